"""Small random models with a non-zero LoRA, batches for them, and the plain transformers computation as their truth."""

from __future__ import annotations

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AttentionInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from spiral_fast.attention import ATTENTION
from spiral_fast.config import Config
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.model import LoadedModel

VOCABULARY = 50
CONTEXT = 256
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # its q, k, v layers have biases
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # its queries and keys are normalised
}
WINDOW = 8
WINDOWED = {  # its changes to the config: which layers see WINDOW tokens
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),  # all
    "qwen2": (*FAMILIES["qwen2"], {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8},
    ),
}


def base_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes):
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = model_class(config_class(**settings | changes)).to(dtype).requires_grad_(False)
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):  # transformers' own round to float32
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype)
                exact.weight.data.uniform_(0.5, 1.5)
                setattr(module, name, exact.requires_grad_(False))
    return model


def _plain_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention of whole sequences in the dtype of its inputs (transformers' eager one rounds to float32)."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("plain", _plain_attention)


def plain_peft(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> PeftModel:
    """peft's own layers, one whole sequence at a time: the truth."""
    base = base_model(family, dtype, seed, **changes)
    base.set_attn_implementation("plain")
    lora = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=False).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for _, parameter in adapter(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def adapter(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if "lora_" in name]


def loaded(family: str = "qwen3", dtype: torch.dtype = torch.float64, seed: int = 0) -> LoadedModel:
    """The same weights as plain_peft, as load_model would hand them over."""
    model = plain_peft(family, dtype, seed)
    fuse_lora(model)
    model.get_base_model().set_attn_implementation(ATTENTION)
    return LoadedModel(model, None, frozenset([1]), CONTEXT)


def save_tokenizer(folder) -> None:
    """Words t0, t1, ...; end of sequence t5."""
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)), eos_token="t5")
    tokenizer.save_pretrained(folder)


def config(temperature: float = 1.0, **learner) -> Config:
    return Config.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused"},
            "problems": {"source": "parts"},
            "rollout": {"temperature": temperature},
            "learner": {"learning_rate": 1e-2} | learner,
        }
    )


def make_rows(lengths: list[tuple[int, int]], seed: int = 0, *, off_policy: float = 0.3) -> list[Row]:
    """One row per (prompt length, sampled tokens): random tokens, credits, weights and engine log-probs."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, (n_prompt, n_sampled) in enumerate(lengths):
        rollout_logp = -np.log(VOCABULARY) + off_policy * rng.standard_normal(n_sampled)
        rows.append(
            Row(
                rng.integers(0, VOCABULARY, n_prompt).tolist(),
                rng.integers(0, VOCABULARY, n_sampled).tolist(),
                rollout_logp.astype(np.float32),
                float(rng.standard_normal()),
                float(rng.uniform(0.1, 0.5)),
                index % 2,
            )
        )
    return rows


RAGGED = make_rows([(5, 7), (9, 7), (3, 1), (1, 4), (12, 9), (6, 6), (6, 6), (2, 11)])


def plain_logits(model: PeftModel, row: Row) -> torch.Tensor:
    """(len(row.tokens), V): one sequence alone, all logits, no packing."""
    ids = torch.tensor([row.prompt + row.tokens])
    return model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1]


def plain_log_probs(model: PeftModel, row: Row, temperature: float) -> torch.Tensor:
    logp = (plain_logits(model, row) / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(row.tokens)[:, None])[:, 0]


def plain_loss(model: PeftModel, rows: list[Row], temperature: float) -> torch.Tensor:
    """The loss of the design, literally."""
    terms = []
    for row in rows:
        ratio = (plain_log_probs(model, row, temperature) - torch.from_numpy(row.rollout_logp)).exp()
        terms.append(-row.weight * row.credit * ratio.sum())
    return torch.stack(terms).sum()


def plain_gradient(model: PeftModel, rows: list[Row], temperature: float) -> dict[str, torch.Tensor]:
    names, parameters = zip(*adapter(model), strict=True)
    gradients = torch.autograd.grad(plain_loss(model, rows, temperature), parameters)
    return dict(zip(names, gradients, strict=True))


def gradient_of_step(learner: Learner, rows: list[Row]):
    """The gradient handed to the optimiser, which is not run, and the stats."""
    seen = {}
    step = learner.optimiser.step

    def capture():
        seen.update({name: parameter.grad.clone() for name, parameter in learner.parameters.items()})

    learner.optimiser.step = capture
    stats = learner.step(rows)
    learner.optimiser.step = step
    return seen, stats


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys() and a
    return max((a[name] - b[name]).abs().max().item() for name in a)

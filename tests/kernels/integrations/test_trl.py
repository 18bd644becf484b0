"""TRL's own GRPOTrainer trains two steps with and without us: the same losses, entropies and parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import spiral_kernels.integrations.trl as integration
from spiral_kernels.integrations import head
from spiral_kernels.integrations.trl import use_linear_logprob
from spiral_kernels.linear_logprob import LogProbs

trl = pytest.importorskip("trl", minversion="1.15", reason="trl >= 1.15 is not installed: pip install -e '.[dev]'")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.15,  # far from uniform, yet sequences end
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny random models with a tokenizer."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    folders = {}
    for name, make, settings in (
        ("qwen3", lambda s: Qwen3ForCausalLM(Qwen3Config(**s)), {"tie_word_embeddings": False}),
        ("qwen3_tied", lambda s: Qwen3ForCausalLM(Qwen3Config(**s)), {"tie_word_embeddings": True}),
        ("phi", lambda s: PhiForCausalLM(PhiConfig(**s)), {"partial_rotary_factor": 1.0}),  # its head has a bias
        ("gemma2", lambda s: Gemma2ForCausalLM(Gemma2Config(**s)), {"final_logit_softcapping": 2.0}),
    ):
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        model = make(SIZES | settings)
        if model.lm_head.bias is not None:
            torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def reward(completion_ids, **_):
    """The share of even ids, and a little for length: differs within nearly every group."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


class Recording(trl.GRPOTrainer):
    """Keeps what the metrics round."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss


def make_trainer(folder, tmp_path, *, lora: bool = False, **options) -> Recording:
    """For two optimiser steps of plain SGD without clipping of norms: Adam would hide a gradient of wrong size."""
    defaults = {"learning_rate": 0.3, "max_completion_length": 6, "per_device_train_batch_size": 4, "max_steps": 2}
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        num_generations=4,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        optim="sgd",
        max_grad_norm=1e9,
        lr_scheduler_type="constant",
        **{"bf16": False} | defaults | options,
    )
    torch.manual_seed(0)
    trainer = Recording(
        str(folder),
        reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w3 w4", "w5", "w7 w8 w9", "w2 w2 w30 w40"] * 2}),
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.losses = []
    return trainer


def trained(folder, tmp_path, *, ours: bool, **options):
    """(losses, logged entropies, clipped shares and KL, parameters) of two optimiser steps."""
    trainer = make_trainer(folder, tmp_path, **options)
    if ours:
        use_linear_logprob(trainer)
    trainer.train()
    logged = [
        value
        for entry in trainer.state.log_history
        for name, value in sorted(entry.items())
        if name.startswith(("entropy", "kl", "clip_ratio", "cispo", "vespo"))
    ]
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return torch.tensor(trainer.losses), torch.tensor(logged), parameters


def assert_same(found, expected, *, rtol=1e-5, atol=2e-6):
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(found[1], expected[1], rtol=rtol, atol=atol)
    assert found[2].keys() == expected[2].keys()
    for name, parameter in expected[2].items():
        torch.testing.assert_close(found[2][name], parameter, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


TWO_EPOCHS = {"num_iterations": 2, "max_steps": 2}  # the second step is off-policy: its ratios are not 1

CASES = {
    "grpo": {"loss_type": "grpo", **TWO_EPOCHS},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "gradient_accumulation_steps": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "temperature": 0.7, **TWO_EPOCHS},
    "bnpo": {"loss_type": "bnpo", "beta": 0.1, **TWO_EPOCHS},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "delta": None, **TWO_EPOCHS},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, **TWO_EPOCHS},
    "sapo": {"loss_type": "sapo", **TWO_EPOCHS},
    "vespo": {"loss_type": "vespo", **TWO_EPOCHS},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "learning_rate": 0.03, **TWO_EPOCHS},
    "entropy_bonus": {"loss_type": "dapo", "entropy_coef": 0.1, **TWO_EPOCHS},
    # Not .5: the four first tokens of a prompt have one entropy, and rounding would decide which of them are above it.
    "high_entropy_tokens": {"loss_type": "dapo", "top_entropy_quantile": 0.8},
}


@pytest.mark.parametrize("case", CASES)
def test_same_training(models, tmp_path, case):
    found, expected = (trained(models["qwen3"], tmp_path, ours=ours, **CASES[case]) for ours in (True, False))
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3_tied", {"lora": True, "beta": 0.1, **TWO_EPOCHS}),
        ("qwen3_tied", {"cast_lm_head_to_fp32": True}),
        ("gemma2", {"lora": True}),
        ("phi", {"lora": True}),
    ],
)
def test_other_models(models, tmp_path, model, options):
    found, expected = (trained(models[model], tmp_path, ours=ours, **options) for ours in (True, False))
    assert_same(found, expected)


def test_the_lines_of_the_docs(models, tmp_path):
    """As they stand in docs/kernels.md; train() makes a step through our head."""
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "GRPOTrainer(" in c]
    prepared = make_trainer(models["qwen3"], tmp_path, max_steps=1)
    namespace = {"GRPOTrainer": trl.GRPOTrainer, "model": str(models["qwen3"]), "reward": reward}
    exec(code, namespace | {"args": prepared.args, "dataset": prepared.train_dataset}, namespace)
    assert namespace["trainer"].state.global_step == 1
    assert namespace["trainer"].model.forward.__func__.__code__.co_filename == integration.__file__


def test_bfloat16_autocast(models, tmp_path):
    """The head's dtype is autocast's on both sides; rounding differs."""
    found, expected = (trained(models["qwen3"], tmp_path, ours=ours, bf16=True, max_steps=1) for ours in (True, False))
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=1e-3)


def test_a_head_cast_to_float32_stays_so_under_autocast(models, tmp_path, monkeypatch):
    dtypes, answer = set(), integration.logprob_and_entropy
    monkeypatch.setattr(
        integration, "logprob_and_entropy", lambda hidden, *a, **k: dtypes.add(hidden.dtype) or answer(hidden, *a, **k)
    )
    trained(models["qwen3"], tmp_path, ours=True, bf16=True, cast_lm_head_to_fp32=True, max_steps=1)
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("lora", [False, True])
def test_training_is_ours(models, tmp_path, monkeypatch, lora):
    """With zeros for our log-probs training comes out different, so the tests above do compare us with TRL."""

    def zeros(hidden, weight, targets, **_):
        nothing = 0 * hidden.sum() * torch.ones(len(targets))
        return LogProbs(nothing, nothing.detach(), nothing.detach())

    options = {"lora": lora, "loss_type": "grpo", **TWO_EPOCHS}
    expected = trained(models["qwen3"], tmp_path, ours=False, **options)
    for module in (integration, head):
        monkeypatch.setattr(module, "linear_logprob", zeros)
    found = trained(models["qwen3"], tmp_path, ours=True, **options)
    with pytest.raises(AssertionError):
        assert_same(found, expected)


REFUSED = [
    (lambda t: (t.args, "fp16", True), "fp16=True is not served; set bf16=True or cast_lm_head_to_fp32=True"),
    (lambda t: (t, "is_fsdp_enabled", True), "FSDP is not served"),
    (lambda t: (t, "is_deepspeed_enabled", True), "DeepSpeed is not served"),
    (lambda t: (t, "aux_loss_enabled", True), "the router loss of a mixture of experts is not served"),
    (lambda t: (t.model.config, "logits_scaling", 8.0), "logits_scaling = 8.0 in the config is not served"),
    (
        lambda t: (t.model, "lm_head", torch.nn.Sequential(t.model.lm_head)),
        "a head that is Sequential, not nn.Linear, is not served",
    ),
    (lambda t: (t.model, "lm_head", torch.nn.Linear(16, VOCABULARY)), "a trained bias of the head is not served"),
]


def test_what_is_refused(models, tmp_path):
    trainer = make_trainer(models["qwen3"], tmp_path)
    before = trainer.model.forward
    for change, message in REFUSED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*change(trainer), raising=False)
            with pytest.raises(ValueError, match=re.escape(f"use_linear_logprob: {message}")) as error:
                use_linear_logprob(trainer)
        assert "\n" not in str(error.value)
        assert trainer.model.forward == before


def test_another_trainer_is_refused():
    with pytest.raises(TypeError, match="needs a trl.GRPOTrainer, got Linear"):
        use_linear_logprob(torch.nn.Linear(2, 2))


def test_an_old_trl_is_refused(monkeypatch):
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head")
    with pytest.raises(ImportError, match=r"needs trl >= 1\.15, found"):
        use_linear_logprob(None)

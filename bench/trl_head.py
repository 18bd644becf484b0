"""What TRL's GRPOTrainer asks its model for, with TRL's own fused head and with ours: python -m bench.trl_head

Log-probs and entropies of 8 completions of 128 tokens behind prompts of 128, forward and backward, under a one-layer
Qwen3 with SmolLM2-135M's head (H 576, V 49152). One thread, CPU seconds, best of 3; peak memory beyond model and
inputs. Each line is a process of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

SEQUENCES, PROMPT, COMPLETION = 8, 128, 128
CASES = [
    (dtype, head, who) for dtype in ("float32", "bfloat16") for head in ("frozen", "trained") for who in ("trl", "ours")
]


def measure(dtype: str, head: str, who: str) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from spiral_kernels.integrations.trl import answer_here

    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = Qwen3Config(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=1, **heads)
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.lm_head.weight.requires_grad_(head == "trained")
    model.get_input_embeddings().weight.requires_grad_(False)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if who == "ours":
        answer_here(model, temperature=1.0, in_float32=False, with_entropy=True)
    input_ids = torch.randint(49152, (SEQUENCES, PROMPT + COMPLETION))
    labels = input_ids.clone()
    labels[:, :PROMPT] = -100

    def step() -> float:
        start = time.process_time()
        output = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        output.log_probs.sum().backward()
        model.zero_grad()
        return time.process_time() - start

    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_mb()
    seconds = min(step() for _ in range(3))
    peak = peak_mb() - before
    return f"| {dtype} | {head} | {who} | {seconds:.2f} | {peak:.0f} |"


def peak_mb() -> float:
    """Peak resident memory of this process; Linux."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def main(case: list[str]) -> None:
    if case:
        print(measure(*case))
        return
    print("| dtype | head | | CPU seconds | peak MB |\n|---|---|---|---|---|", flush=True)
    for case in CASES:
        subprocess.run([sys.executable, "-m", "bench.trl_head", *case], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="dtype, head and trl or ours: this line alone, in this process")
    main(parser.parse_args().case)

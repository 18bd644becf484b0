"""From which vocabulary on linear_logprob pays on this CPU: python -m bench.crossover

Forward and backward of the summed log-probs, one thread, CPU time, best of 7, beside log_softmax of the full logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from spiral_kernels import linear_logprob

SHAPES = ((2048, 64, 64), (2048, 64, 256), (2048, 256, 1024), (2048, 256, 4096), (512, 576, 32000))  # T, H, V


def milliseconds(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(7):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    torch.set_num_threads(1)
    print("| T | H | V | dtype | head | full log_softmax, ms | linear_logprob, ms | times faster |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for n_tokens, n_hidden, vocabulary in SHAPES:
            for trained in (False, True):
                hidden = torch.randn(n_tokens, n_hidden, dtype=dtype, requires_grad=True)
                weight = (torch.randn(vocabulary, n_hidden) / n_hidden**0.5).to(dtype).requires_grad_(trained)
                targets = torch.randint(vocabulary, (n_tokens,))

                def full(h=hidden, w=weight, y=targets):
                    (h @ w.T).float().log_softmax(-1).gather(1, y[:, None]).sum().backward()

                def ours(h=hidden, w=weight, y=targets):
                    linear_logprob(h, w, y).logp.sum().backward()

                before, after = milliseconds(full), milliseconds(ours)
                name, head = str(dtype).removeprefix("torch."), "trained" if trained else "frozen"
                shape = f"| {n_tokens} | {n_hidden} | {vocabulary} | {name} | {head}"
                print(f"{shape} | {before:.2f} | {after:.2f} | {before / after:.2f} |", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

"""Times on CUDA at Qwen3-4B's shapes, ours beside peers and floors measured in the same run; one JSON line a figure.

`python -m bench.gpu.benches FILE`. A contender that fails is a line with its error; nothing else stops. Milliseconds
are medians with the inputs on the GPU, after a warm-up; peak memory is what a call needs beyond its inputs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from spiral_kernels import (
    PrefixTree,
    TreePlan,
    available_backends,
    force_backend,
    linear_logprob,
    linear_policy_loss,
    policy_loss,
    set_advantages,
    tree_attention,
)

HIDDEN, VOCABULARY, ROWS = 2560, 151936, 4096
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
BF16 = torch.bfloat16


def milliseconds(run: Callable[[], object], seconds: float = 1.5) -> tuple[float, int]:
    """Median time and the bytes a call needs on top of what is there."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times, total = [], 0.0
    while len(times) < 3 or (total < seconds * 1e3 and len(times) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
        total += times[-1]
    return statistics.median(times), torch.cuda.max_memory_allocated() - before


class Table:
    def __init__(self, file: str):
        self.file = file

    def add(self, bench: str, name: str, run: Callable[[], object], **more) -> float | None:
        try:
            time, memory = milliseconds(run)
            line = {"bench": bench, "name": name, "ms": round(time, 4), "extra_mb": round(memory / 1e6, 1)}
        except Exception as error:  # a peer that cannot run here must not stop the others
            torch.cuda.empty_cache()
            time, line = None, {"bench": bench, "name": name, "error": str(error)[-500:]}
        with open(self.file, "a") as file:
            file.write(json.dumps(line | more) + "\n")
        return time


def forced(backend: str, operation: str, run: Callable[[], object]) -> Callable[[], object]:
    def with_backend():
        force_backend(backend, operation)
        try:
            return run()
        finally:
            force_backend(None, operation)

    return with_backend


def ceilings(table: Table) -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    table.add("ceiling", "bf16 product 8192^3", lambda: a @ b, flops=2 * 8192**3)
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    table.add("ceiling", "copy of 2 GiB", lambda: target.copy_(source), bytes=2 * source.nbytes)


def heads(table: Table) -> None:
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=BF16) * 0.02
    targets = torch.randint(VOCABULARY, (ROWS,), device="cuda")
    credit, ones = torch.randn(ROWS, device="cuda"), torch.ones(ROWS, device="cuda")
    with torch.no_grad():
        rollout = linear_logprob(hidden, weight, targets).logp
    shape = {"rows": ROWS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "dtype": "bfloat16, frozen head"}

    def two_products():
        with torch.no_grad():
            for rows in hidden.split(1024):
                (rows @ weight.t()) @ weight

    def plain(hidden):
        return F.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None])[:, 0]

    def chunked(hidden):
        each = zip(hidden.split(512), targets.split(512), strict=True)
        return torch.cat([torch.utils.checkpoint.checkpoint(of_chunk, *x, use_reentrant=False) for x in each])

    def of_chunk(hidden, targets):
        return F.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None])[:, 0]

    def step(logp_of):
        def run():
            ratio = (logp_of(hidden) - rollout).exp()
            torch.autograd.grad((-ratio * credit).sum(), hidden)

        return run

    def ours():
        out = linear_policy_loss(hidden, weight, targets, credit, rollout, ones)
        torch.autograd.grad(out.loss, hidden)

    name = "head: loss and gradient by hidden"
    table.add(name, "floor: its two products", two_products, **shape)
    for backend in ("triton", "torch"):
        table.add(name, f"linear_policy_loss, {backend}", forced(backend, "linear_policy_loss", ours), **shape)
    of_logp = step(lambda h: linear_logprob(h, weight, targets).logp)
    table.add(name, "linear_logprob, its two products", forced("triton", "linear_logprob", of_logp), **shape)
    table.add(name, "peer: full log_softmax", step(plain), **shape)
    table.add(name, "peer: chunks of 512, checkpoint", step(chunked), **shape)
    table.add(name, "peer: full, torch.compile", step(torch.compile(plain)), **shape)

    name = "head: log-probs and entropy alone"

    @torch.no_grad()
    def forward():
        return linear_logprob(hidden, weight, targets, return_entropy=True)

    @torch.no_grad()
    def one_product():
        for rows in hidden.split(1024):
            rows @ weight.t()

    @torch.no_grad()
    def plain_entropy():
        for rows, chosen in zip(hidden.split(1024), targets.split(1024), strict=True):
            log_p = F.log_softmax((rows @ weight.t()).float(), -1)
            log_p.gather(1, chosen[:, None]), torch.special.entr(log_p.exp()).sum(1)

    table.add(name, "floor: its product", one_product, **shape)
    for backend in ("triton", "torch"):
        table.add(name, f"linear_logprob, {backend}", forced(backend, "linear_logprob", forward), **shape)
    table.add(name, "peer: log_softmax and entropy in chunks of 1024", plain_entropy, **shape)


def attention(table: Table) -> None:
    """A problem's tree at the paper's shape, cut to 20 k rows: 8 traces of one prompt, 4 prompts of 4 answers each."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(1 << 30, (n,), generator=generator).tolist()

    prompt, traces = tokens(256), []
    traces += [[prompt, tokens(800)] for _ in range(8)]
    for _ in range(4):
        aggregation_prompt = tokens(1500)
        traces += [[prompt, aggregation_prompt, tokens(400)] for _ in range(4)]
    tree = PrefixTree.from_segments(traces)
    n = tree.computed_tokens
    row = torch.arange(n)
    visible_until = torch.repeat_interleave(tree.subtree_end, tree.end - tree.start)
    mask = ((row[None, :] <= row[:, None]) & (row[:, None] < visible_until[None, :])).cuda()
    visited = int(mask.sum())

    def heads(n_heads: int, rows: int = n) -> torch.Tensor:
        return torch.randn(rows, n_heads, HEAD_SIZE, device="cuda", dtype=BF16, requires_grad=True)

    q, k, v = heads(HEADS), heads(KV_HEADS), heads(KV_HEADS)
    d_out = torch.randn(n, HEADS, HEAD_SIZE, device="cuda", dtype=BF16)
    plan = TreePlan.of(tree, "cuda")
    shape = {
        **{
            "rows": n,
            "rows_without_sharing": tree.logical_tokens,
            "visited_pairs": visited,
            "heads": [HEADS, KV_HEADS],
        },
        "forward_flops": 4 * HEADS * HEAD_SIZE * visited,
    }

    def both(forward: Callable[[], torch.Tensor], inputs, gradient):
        def run():
            torch.autograd.grad(forward(), inputs, gradient)

        return run

    def dense():
        moved = (x.movedim(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*moved, attn_mask=mask, enable_gqa=True)[0].movedim(0, 1)

    serving = [name for name, why_not in available_backends("tree_attention", "cuda", BF16).items() if why_not is None]
    for backend in serving:
        if backend == "reference":  # a matrix of all pairs and heads
            continue
        forward = forced(backend, "tree_attention", lambda: tree_attention(q, k, v, plan))
        table.add("tree attention: forward", backend, torch.no_grad()(forward), **shape)
        table.add("tree attention: forward and backward", backend, both(forward, (q, k, v), d_out), **shape)
    table.add("tree attention: forward", "peer: SDPA, dense mask", torch.no_grad()(dense), **shape)
    table.add("tree attention: forward and backward", "peer: SDPA, dense mask", both(dense, (q, k, v), d_out), **shape)

    lengths = tree.trace_offsets.diff().tolist()
    alone = [
        tuple(x[rows].detach().movedim(0, 1)[None].requires_grad_() for x in (q, k, v))
        for rows in tree.trace_rows.cuda().split(lengths)
    ]

    def flat():
        return [F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in alone]

    def flat_both():
        out = flat()
        torch.autograd.grad(out, [x for qkv in alone for x in qkv], [torch.ones_like(x) for x in out])

    table.add("tree attention: forward", "peer: causal SDPA, every trace alone", torch.no_grad()(flat), **shape)
    table.add("tree attention: forward and backward", "peer: causal SDPA, every trace alone", flat_both, **shape)

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    until = visible_until.cuda()
    blocks = create_block_mask(lambda b, h, i, j: (j <= i) & (i < until[j]), None, None, n, n, device="cuda")
    flex = torch.compile(flex_attention)

    def by_flex():
        moved = (x.movedim(0, 1)[None] for x in (q, k, v))
        return flex(*moved, block_mask=blocks, enable_gqa=True)[0].movedim(0, 1)

    table.add("tree attention: forward", "peer: FlexAttention", torch.no_grad()(by_flex), **shape)
    table.add("tree attention: forward and backward", "peer: FlexAttention", both(by_flex, (q, k, v), d_out), **shape)


def small(table: Table) -> None:
    lengths = torch.randint(512, 4097, (512,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    n = int(lengths.sum())
    logp = -torch.rand(n, device="cuda")
    rollout, credit = logp + 0.1 * torch.randn(n, device="cuda"), torch.randn(512, device="cuda")
    logp.requires_grad_()
    weight = torch.full((n,), 1 / n, device="cuda")
    for loss in ("ppo_clip", "gspo"):

        def run(loss=loss):
            out = policy_loss(logp, rollout, credit, cu_seqlens, token_weight=weight, loss=loss, clip=(0.2, 0.3))
            torch.autograd.grad(out.loss, logp)

        for backend in ("triton", "torch"):
            shape = {"tokens": n, "bytes_at_least": 5 * 4 * n}
            table.add(f"policy_loss: {loss}", backend, forced(backend, "policy_loss", run), **shape)

    from bench.set_advantages.run import inputs

    arguments, gates = inputs(200_000, "cuda")
    for backend in ("triton", "torch"):
        credits = forced(backend, "set_advantages", lambda: set_advantages(*arguments, **gates))
        table.add("set_advantages", backend, credits, problems=200_000)


if __name__ == "__main__":
    of_gpu = Table(sys.argv[1])
    for bench in (ceilings, small, heads, attention):
        try:
            bench(of_gpu)
        except Exception as error:  # in a bench's inputs: the others are still worth having
            with open(sys.argv[1], "a") as out:
                out.write(json.dumps({"bench": bench.__name__, "error": str(error)[-500:]}) + "\n")

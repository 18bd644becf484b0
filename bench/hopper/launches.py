"""What spiral_kernels launches on a Hopper GPU at Qwen3-4B's shapes, operation by operation.

To add a kernel: write a function here that calls its launchers as the operation does, and name it in OPERATIONS.
Nothing runs: compiled.py stands in for the GPU, so every `kernel[grid](...)` in reach is compiled exactly as Triton
would specialise that launch (dtypes, 16-byte alignment, integers divisible by 16 or equal to 1, tile constants, warps,
stages), and its row appears in docs/hopper.md, which `python -m bench.hopper` writes anew (`python -m bench.hopper
head_rows` only prints that operation's rows). Tensors may lie on `meta`, which costs no memory, or on the CPU where the
launcher reads values; launchers must take the tile sizes they would take on a GPU. Call each launcher once per compiled
variant that training uses: bfloat16, and float32 where it serves that.

A kernel whose stack is not 0 (registers spilled) needs its reason in STACK.
"""

from __future__ import annotations

import torch

HIDDEN, VOCABULARY = 2560, 151936  # H, V
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # Hq, Hkv, D
TOKENS = 8192  # T of a packed batch; only its divisibility matters to a compiled kernel

# kernel's name -> why up to 64 bytes of stack are right there
STACK: dict[str, str] = {}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def head_rows() -> None:
    """The row kernel of linear_logprob and linear_policy_loss on a chunk of rows: sums, gradient, or both at once."""
    from spiral_kernels.linear_logprob import triton_rows
    from spiral_kernels.linear_logprob.tiles import RowGradient, RowSums, Tile

    vector, targets, bias = meta(16), meta(16, dtype=torch.int64), meta(VOCABULARY)
    sums = RowSums(vector, vector, vector)
    for dtype in (torch.float32, torch.bfloat16):
        for of_head in ((None, None), (bias, 30.0)):
            tile = Tile(meta(16, VOCABULARY), 0, targets, vector, *of_head)
            triton_rows.accumulate(tile, sums)
            triton_rows.sums_and_gradient(tile, sums, vector, None if tile.soft_cap is None else vector, dtype)
            triton_rows.gradient(tile, RowGradient(*[vector] * 4, None, None), dtype)
            triton_rows.gradient(tile, RowGradient(*[vector] * 6), dtype)


def head_forward() -> None:
    """linear_logprob without a gradient: no logits; a plain head and one with bias, soft cap and row index."""
    from spiral_kernels.linear_logprob.head import Head
    from spiral_kernels.linear_logprob.triton_forward import row_sums

    rows, targets = meta(TOKENS), meta(TOKENS, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = meta(TOKENS, HIDDEN, dtype=dtype), meta(VOCABULARY, HIDDEN, dtype=dtype)
        row_sums(hidden, Head(weight, None, None), targets, None, rows, True)
        row_sums(hidden, Head(weight, meta(VOCABULARY), 30.0), targets, targets, rows, True)


def policy_loss() -> None:
    """The default, everything at once token by token and by sequence, and a batch of one sequence in float64."""
    from spiral_kernels.policy_loss import packed
    from spiral_kernels.policy_loss.triton import policy_loss

    inf = float("inf")
    no_masks, masks = packed.Masks(0.0, inf, 0.0, inf, inf), packed.Masks(0.5, 2.0, 0.5, 2.0, 0.1)
    for sequences, loss, all_policies, dtype in (
        (256, "importance_sampling", False, torch.float32),
        (256, "ppo_clip", True, torch.float32),
        (256, "gspo", True, torch.float32),
        (1, "importance_sampling", False, torch.float64),
    ):
        tokens, credit = meta(TOKENS, dtype=dtype), meta(sequences, dtype=dtype)
        old, ref = (tokens, tokens) if all_policies else (None, None)
        settings = packed.Settings(loss, 0.8, 1.2, 3.0, 2.0, 0.1, "k3")
        cu_seqlens = meta(sequences + 1, dtype=torch.int64)
        of_loss = settings, masks if all_policies else no_masks
        policy_loss(tokens, tokens, credit, cu_seqlens, old, ref, tokens, *of_loss, True)


def set_advantages() -> None:
    """Rewards as float32 with the gate, as whole numbers without."""
    from spiral_kernels.set_advantages.triton import launch

    problems, traces = 256, 256 * 8
    sets, members = 4 * problems, 16 * problems

    def whole(n: int) -> torch.Tensor:
        return meta(n, dtype=torch.int64)

    of_sets = whole(sets + 1), whole(members), whole(sets + 1), whole(problems + 1), whole(problems + 1)
    launch(meta(members), *of_sets, whole(traces), whole(members), 4096, 2048, traces)
    launch(whole(members), *of_sets, None, None, None, None, traces)


def tree_attention() -> None:
    """Forward and backward, one tile of keys of them in parts; bfloat16 at D 128 and 64, float32 at D 128."""
    from types import SimpleNamespace

    from spiral_kernels.tree_attention import triton_kernels, triton_tiles

    nodes = [torch.tensor(values) for values in ([0, 4096], [4096, TOKENS], [-1, 0], [TOKENS, TOKENS])]
    tiles = triton_tiles.plan_tiles(*nodes)._replace(parts=torch.empty(2, dtype=torch.int32))
    plan = SimpleNamespace(visible_until=meta(TOKENS, dtype=torch.int32), tiles=[tensor.to("meta") for tensor in tiles])
    for dtype, size in ((torch.bfloat16, HEAD_SIZE), (torch.bfloat16, 64), (torch.float32, HEAD_SIZE)):
        q, k, v = (meta(TOKENS, heads, size, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out, lse = triton_kernels.forward(q, k, v, plan, 0.1)
        triton_kernels.backward(out, q, k, v, out, lse, plan, 0.1)


OPERATIONS = (head_rows, head_forward, policy_loss, set_advantages, tree_attention)

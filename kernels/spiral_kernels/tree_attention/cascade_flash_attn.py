"""tree_attention as a cascade (cascade.py) of calls of the package flash-attn."""

from __future__ import annotations

from functools import partial

from spiral_kernels.tree_attention import cascade, flash_attn_calls

forward = partial(cascade.forward, flash=flash_attn_calls)
backward = partial(cascade.backward, flash=flash_attn_calls)

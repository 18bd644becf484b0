"""Memory of the learner by part and moment, each term derived from what the code keeps.

Shape legend: N tokens of a micro-batch (of its prefix tree), R sampled tokens in it, L layers, H hidden size, I width
of the MLP, Q = Hq D and K = Hkv D numbers of a token's queries and keys, r rank, V vocabulary; b bytes of a number.

Trained is the adapter alone, so autograd keeps no input of a frozen norm's weight, and of a linear layer its input and
the adapter's (N, r). Everything else here is a tensor some backward reads, or one that it writes. The base is bfloat16;
its norms run in float32 and keep that copy of their input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spiral_fast.algorithms import ALGORITHMS
from spiral_fast.config import Config
from spiral_fast.plan.shape import Shape
from spiral_kernels.linear_logprob.tiles import CHUNK_BYTES
from spiral_kernels.tree_attention.triton_tiles import LISTED, MOST_SHARES, SPANNED

# Tensors of a sampled token: inputs of the loss (target, hidden row, credit and weight in float64, rollout log-prob),
# its log-prob and entropy; what linear_policy_loss copies and forms of each; what the step's record keeps of it.
BYTES_OF_ROW, BYTES_IN_LOSS, BYTES_IN_RECORD = 44, 100, 32


@dataclass(frozen=True)
class Micro:
    """One micro-batch, and how it is run."""

    tokens: int  # N
    rows: int  # R
    checkpointing: bool
    record_rows: int = 0  # sampled tokens of the whole step: its numbers wait on the GPU for the step's end
    ranks: int = 1  # the learner's GPUs
    sharded: bool = False  # the frozen base is sharded over them by FSDP2, also over one
    offload_checkpoints: bool = False  # layer inputs wait in host memory
    offload_base: bool = False  # the base's shards lie in host memory
    both_levels: bool = True  # search and aggregation are trained: the search term's gradient is kept beside


@dataclass(frozen=True)
class Moment:
    name: str
    parts: dict[str, float]  # bytes

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def kept_by_layer(shape: Shape) -> dict[str, float]:
    """Bytes a token that one layer's backward reads, by place. An adapted linear layer reads its input."""
    b, h, q, k, adapted = shape.element, shape.hidden, shape.query, shape.key, shape.adapted
    low = shape.rank * b  # of one adapted linear layer
    norm = 4 * h + 4  # its float32 input; one number for the mean
    heads = (4 * (q + k) + 4 * (shape.query_heads + shape.key_heads)) if shape.query_key_norm else 0
    of_qkv, of_gate_up = adapted & {"q_proj", "k_proj", "v_proj"}, adapted & {"gate_proj", "up_proj"}
    return {
        "attention norms": norm + heads + bool(of_qkv) * b * h + len(of_qkv) * low,
        # q, k, v, result, its log-sum-exp
        "attention": b * (q + 2 * k) + b * q + 4 * shape.query_heads + ("o_proj" in adapted) * low,
        "mlp norm": norm + bool(of_gate_up) * b * h + len(of_gate_up) * low,
        "mlp": 3 * b * shape.mlp,  # gate, its SiLU, up
        "down": ("down_proj" in adapted) * (b * shape.mlp + low),
    }


def held(shape: Shape, micro: Micro) -> dict[str, float]:
    """What is there all the time of a step."""
    base = float(shape.base_bytes)
    if micro.sharded:  # gathered beside the shards: a layer in use, maybe one on its way, and the root group
        layer = shape.layer_numbers * shape.element
        layers = 2 if micro.ranks > 1 or micro.offload_base else 1
        base = _shards(shape, micro) + layers * layer + shape.base_bytes - shape.layers * layer
    adapter = shape.adapter_bytes  # whole on each rank, as are its gradient and moments
    return {
        "base weights": base,
        "adapter": adapter,
        "optimiser moments": 2 * adapter,
        "gradient": adapter * (2 if micro.both_levels else 1),
        "batch and record": 20 * micro.tokens + BYTES_OF_ROW * micro.rows + BYTES_IN_RECORD * micro.record_rows,
    }


def _shards(shape: Shape, micro: Micro) -> float:
    """Bytes on the device."""
    return 0.0 if micro.offload_base else shape.base_bytes / micro.ranks


def resting(shape: Shape, micro: Micro, *, sampling: bool) -> dict[str, float]:
    """What the learner leaves on the device during rollout. sampling: the embedded engine reads its base there, whole:
    at one rank the shards themselves, at more a gathered copy beside them."""
    whole, shards = float(shape.base_bytes), _shards(shape, micro) if micro.sharded else float(shape.base_bytes)
    if sampling:
        shards = whole + (shards if micro.sharded and micro.ranks > 1 else 0.0)
    return {"base weights": shards, "adapter": shape.adapter_bytes, "optimiser moments": 2 * shape.adapter_bytes}


def crosses_the_bus(shape: Shape, micro: Micro, tokens: float, micro_batches: float) -> float:
    """Bytes that offloading moves between host and device in a step of a rank: out and in, or in for the forward and
    for the backward."""
    checkpoints = micro.offload_checkpoints * tokens * _checkpoints(shape)
    return 2 * (checkpoints + micro.offload_base * micro_batches * shape.base_bytes / micro.ranks)


def held_by_host(shape: Shape, micro: Micro) -> dict[str, float]:
    """What offloading keeps in (pinned) host memory, bytes of one rank."""
    return {
        "base weights": micro.offload_base * shape.base_bytes / micro.ranks,
        "checkpoints (layer inputs)": micro.offload_checkpoints * micro.tokens * _checkpoints(shape),
    }


def _checkpoints(shape: Shape) -> int:
    """Bytes a token of all layers' inputs."""
    return shape.layers * shape.element * shape.hidden


def moments(shape: Shape, micro: Micro) -> list[Moment]:
    """The moments of a step that can be its peak."""
    b, h, q, k = shape.element, shape.hidden, shape.query, shape.key
    n, rows, always = micro.tokens, micro.rows, held(shape, micro)
    layer = kept_by_layer(shape)
    rotary = 2 * b * q / shape.query_heads  # cosines and sines, one for all layers
    if micro.checkpointing:
        # offloaded ones come back one by one, and a layer that was run again reads its norms' copies of them
        on_device = 0 if micro.offload_checkpoints else _checkpoints(shape)
        kept = {"checkpoints (layer inputs)": n * (on_device + rotary)}
        name, others = "one layer's backward", 0.0
    else:
        kept = {"activations kept": n * (shape.layers * sum(layer.values()) + rotary)}
        name, others = "a layer's backward, less what it freed", sum(layer.values())

    chunk_rows = -(-rows // max(1, -(-rows // max(1, CHUNK_BYTES["cuda"] // (4 * shape.vocabulary)))))
    chunk = chunk_rows * (4 * shape.vocabulary + (2 * b + 12) * h)  # logits; hidden rows and their products
    by_token = n * (4 + b) * h  # the rows' gradients summed by hidden state, and that in b bytes
    head = {
        "head: gradient of each row": rows * (4 * h + BYTES_IN_LOSS),
        "head: chunk of logits, or sum by token": max(chunk, by_token),
    }
    final = {"last norm and hidden state": n * ((4 + b) * h + 4)}

    # Backward of SiLU times up: the product's gradient and both factors' are there, the product itself is gone.
    mlp = sum(layer.values()) - layer["down"] + 3 * b * shape.mlp + b * h
    # Backward of attention: gradients of result, q, k, v; two numbers a row and head; parts of split tiles of keys.
    attention = layer["attention norms"] + layer["attention"] + 2 * b * (q + k) + b * h
    # Backward of a norm over d numbers: its float32 input, and five more like it at once (the square's derivative).
    norm = layer["attention norms"] + layer["attention"] + 24 * h + b * h  # of the MLP
    if shape.query_key_norm:  # of the queries, the last of the attention's: keys and values are done
        norm = max(norm, 4 * h + 3 * b * h + 24 * q)
    workspace = 8 * shape.query_heads * (n + LISTED[0]) + 2 * 2 * MOST_SHARES * SPANNED[1] * 4 * k

    def backward(of_layer: float) -> dict[str, float]:
        return {name: n * (of_layer - others)}

    return [
        Moment("head", always | kept | final | head),
        Moment("MLP backward", always | kept | backward(mlp)),
        Moment("norm backward", always | kept | backward(norm)),
        Moment("attention backward", always | kept | backward(attention) | {"attention workspace": workspace}),
        # the flat gradient and its terms, AdamW's temporaries
        Moment("update", always | {"update": 4 * shape.adapter_bytes}),
    ]


def peak(shape: Shape, micro: Micro) -> Moment:
    return max(moments(shape, micro), key=lambda moment: moment.total)


def micro_of(config: Config, tokens: int, ranks: int, record_rows: int = 0) -> Micro:
    """A micro-batch of so many tokens, all of them sampled, as this config runs it."""
    learner = config.learner
    return Micro(
        tokens,
        tokens,
        learner.checkpointing,
        record_rows,
        ranks,
        sharded=learner.fsdp,
        offload_checkpoints=learner.offload_checkpoints,
        offload_base=learner.offload_base,
        both_levels=ALGORITHMS[config.credit.algorithm].trains_both,
    )


def largest_tree(shape: Shape, usable: float, like: Micro) -> int:
    """The most tokens of one micro-batch run like this that fit, every one of them sampled; 0 if none do."""

    def fits(tokens: int) -> bool:
        return peak(shape, replace(like, tokens=tokens, rows=tokens)).total <= usable

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > 2**31:  # row numbers of a tree are 32-bit
            return 2**31 - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""What tests/learner/test_ranks.py runs, as it is, in one process and in several. Every case returns plain values and
arrays, which must be the same on every rank and, up to rounding, whatever the number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spiral_fast import ranks
from spiral_fast.attention import ATTENTION
from spiral_fast.learner import learner as learner_module
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.model import LoadedModel
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.engine import NonFiniteLogits, Request
from spiral_fast.trace import TraceKey
from tests.learner.test_engine_agreement import largest_gap, sample
from tests.learner.test_two_adapters import loaded_two
from tests.learner.tiny import CONTEXT, RAGGED, config, make_rows, plain_peft

FLOAT = torch.float32


def with_prompt(rows: list[Row], prompt: list[int]) -> list[Row]:
    return [dataclasses.replace(row, prompt=prompt) for row in rows]


LONG = make_rows([(30, 1)], seed=1)[0].prompt
TREE = [*RAGGED, *with_prompt(RAGGED, LONG)]
UNEVEN = [*make_rows([(9, 200)], seed=2), *with_prompt(make_rows([(1, n) for n in range(3, 10)], seed=3), LONG)]
UNEVEN = [dataclasses.replace(row, level=0) for row in UNEVEN]  # a tree of 209 tokens, and seven rows below one prompt
ONE = [dataclasses.replace(RAGGED[0], level=1)]  # fewer rows than ranks
FINITE = dict(sharing="tree", micro_batch_tokens=40)
STEPS = {  # name: (rows, tied head, settings of the learner)
    "tied, sharded": (TREE, True, FINITE | dict(fsdp=True, checkpointing=True)),
    "untied, sharded, base on the host": (TREE, False, FINITE | dict(fsdp=True, offload_base=True)),
    "whole": (TREE, True, FINITE | dict(clip_norm=0.5)),
    "sharing none, sharded": (TREE, False, dict(sharing="none", micro_batch_tokens=40, fsdp=True)),
    "sharing set, whole": (TREE, False, dict(sharing="set", micro_batch_tokens=1000)),
    "uneven, sharded": (UNEVEN, True, FINITE | dict(fsdp=True)),
    "one row, sharded": (ONE, True, FINITE | dict(fsdp=True)),
}


def parts(dtype: torch.dtype = FLOAT, *, tied: bool = True) -> LoadedModel:
    model = plain_peft("qwen3", dtype, tie_word_embeddings=tied)
    if ranks.rank():  # ranks begin with the adapter of rank 0
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.add_(1.0)
    if dtype == torch.bfloat16:  # as load_model has it
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    fuse_lora(model)
    model.get_base_model().set_attn_implementation(ATTENTION)
    return LoadedModel(model, None, frozenset([1]), CONTEXT)


def arrays(learner: Learner) -> dict[str, np.ndarray]:
    return {name: p.detach().float().numpy().copy() for name, p in learner.parameters.items()}


def step(rows: list[Row], tied: bool, settings: dict[str, Any], dtype: torch.dtype = FLOAT) -> dict[str, Any]:
    learner = Learner(config(**settings), parts(dtype, tied=tied))
    base = [p for p in learner.policy.parameters() if not p.requires_grad]
    of_all = all(isinstance(p, DTensor) and p.device_mesh.size() == ranks.size() for p in base)
    assert of_all == bool(settings.get("fsdp"))
    stats = [vars(learner.step(rows)) for _ in range(2)]
    return {"stats": stats, "adapter": arrays(learner)}


def others(folder: Path) -> dict[str, Any]:
    """log_probs, the supervised step, numbers that are not finite, the self-check, the engine, two adapters."""
    sharded = parts()
    learner = Learner(config(**FINITE, fsdp=True), sharded)
    found: dict[str, Any] = {"log-probs": np.concatenate(learner.log_probs(TREE))}
    found["supervised"] = [learner.supervised_step(TREE, 1e-2) for _ in range(2)]
    found["after supervised"] = arrays(learner)
    bad = [dataclasses.replace(row) for row in TREE]
    bad[3] = dataclasses.replace(bad[3], rollout_logp=np.full(len(bad[3].tokens), -1e30, np.float32))
    found["not finite"] = vars(learner.step(bad)) | {"loss": "inf", "gradient_norm": "nan"}
    found["blamed"] = found["not finite"]["skipped_rows"]
    found["skipped"] = arrays(learner)  # as before

    unshard, calls = FSDPModule.unshard, []
    FSDPModule.unshard = lambda self, *_, **__: (calls.append(self), unshard(self))[1]
    prompts = [row.prompt for row in RAGGED]
    mine = sample(learner, sharded.model, sharded.eos_token_ids, prompts[ranks.rank() :], 1.0)
    FSDPModule.unshard = unshard
    # of the root and both layers; one rank has whole weights anyway
    found["one unshard a rollout"] = len(calls) == len({id(x) for x in calls}) == (3 if ranks.size() > 1 else 0)
    found["engine agrees"] = float(largest_gap(learner, ranks.gather(mine)[0])) < 1e-4

    source = PolicySource(sharded)
    with learner.rollout_weights():  # rank 0 alone proves its servers, as often as it likes, while the others wait
        row = ranks.from_first(lambda: source.log_probs(RAGGED[0].prompt, RAGGED[0].tokens, 1.0))
        base = ranks.from_first(lambda: source.base_log_probs(RAGGED[0].prompt, RAGGED[0].tokens, 1.0))
        ranks.from_first(lambda: len(source.adapter().tensors))
    found["as rank 0 reads it"], found["its base"] = row, base
    found["log-probs again"] = learner.log_probs(RAGGED[:1])[0]
    # a rank that sampled nothing still gathers what the others gather in the backwards that follow
    sample(learner, sharded.model, sharded.eos_token_ids, [] if ranks.rank() else prompts[:2], 1.0)
    found["steps after it"] = [learner.step(TREE).gradient_norm for _ in range(2)]

    two = Learner(config(**FINITE, fsdp=True), loaded_two(FLOAT))
    two.step(TREE)
    before = {name: value for name, value in arrays(two).items() if ".search." in name}
    two.step([row for row in TREE if row.level > 0])
    found["two adapters"] = arrays(two)
    found["search left alone"] = all(np.array_equal(found["two adapters"][name], before[name]) for name in before)
    few = [row for row in TREE if row.level == 0] + [row for row in TREE if row.level > 0][:1]  # one row for phi
    found["two adapters, supervised"] = [two.supervised_step(few, 1e-5) for _ in range(2)], arrays(two)

    pack_tree, wrong = learner_module.MicroBatches.__iter__, ranks.size() - 1

    def broken(self):
        for part, packed in pack_tree(self):
            if ranks.rank() == wrong:  # on one rank alone
                packed.positions = packed.positions + 3
                packed.tokens = packed.tokens.flip(1)
            yield part, packed

    learner_module.MicroBatches.__iter__ = broken
    try:
        Learner(config(**FINITE, fsdp=True), parts()).step(TREE)
    except FloatingPointError as error:
        found["self-check"] = "differs from the one without sharing" in str(error)
    finally:
        learner_module.MicroBatches.__iter__ = pack_tree
    return found


def resumed(folder: Path, *, fsdp: bool) -> dict[str, Any]:
    """Two steps; then the second again from what the first left, and from what other numbers of ranks left."""
    settings = config(**FINITE, fsdp=fsdp)
    learner = Learner(settings, parts())
    learner.step(TREE)
    if ranks.rank() == 0:
        learner.save(folder / f"of_{ranks.size()}_{fsdp}")
    stats = vars(learner.step(TREE))
    ranks.gather(None)  # the files are there
    found = {"stats": stats, "adapter": arrays(learner)}
    for file in sorted(folder.glob(f"of_*_{fsdp}")):
        again = Learner(settings, parts())
        again.restore(file)
        same = vars(again.step(TREE)), arrays(again)
        if file.name == f"of_{ranks.size()}_{fsdp}":
            bits = same[0] == stats and all(np.array_equal(same[1][n], found["adapter"][n]) for n in same[1])
            found["same bits with as many ranks"] = bits
        found[file.name] = same[1]
    return found


def meeting() -> dict[str, Any]:
    """spiral_fast/ranks.py itself."""
    n = ranks.size()
    found: dict[str, Any] = {
        "shared out": ranks.share_out(lambda some: [(x, x * x) for x in some], list(range(7))),
        "to the first": ranks.share_out(lambda some: [ranks.rank()] * len(some), list(range(3)), among=1),
        "nothing": ranks.share_out(lambda some: some, []),
        "from the first": ranks.from_first(lambda: ("rank", ranks.rank())),
    }
    spread = ranks.share_out(lambda some: [ranks.rank()] * len(some), list(range(2 * n)))
    found["evenly"] = spread == 2 * list(range(n))
    request = Request(TraceKey("p7", 0, -1, 0), (1,), 1, 1.0, 0)

    def fail(error: Exception):
        def work() -> None:
            if ranks.rank() == n - 1:
                raise error

        return work

    class Here(Exception):  # a class that other processes cannot name
        pass

    try:
        ranks.on_each(fail(NonFiniteLogits([request], 3)))
    except NonFiniteLogits as error:
        found["error"] = str(error), error.problems
    try:
        ranks.on_each(fail(Here("only here")))
    except Exception as error:
        found["unknown error"] = "only here" in str(error)
    return found


def everything(folder: Path) -> dict[str, Any]:
    found = {name: step(*case) for name, case in STEPS.items()}
    found["bfloat16"] = step(TREE, True, FINITE | dict(fsdp=True), torch.bfloat16)
    found["others"] = others(folder)
    for fsdp in (True, False):
        found[f"resumed, fsdp {fsdp}"] = resumed(folder, fsdp=fsdp)
    found["meeting"] = meeting()
    return found

"""The processes of one training, its ranks: as many as torchrun started, else this one alone.

All ranks run the same program on the same draws. Where they meet: `share_out` splits a list among them and gathers what
each made of its part, `sum_over` adds up a tensor, `from_first` takes a decision that rank 0 alone can take (it alone
writes the run's folder). With one rank each of these is the plain call.

Objects travel pickled: sender and receiver are processes of one program that trust each other anyway, on connections
that torchrun set up among them; nothing sampled or downloaded is ever unpickled, only carried inside.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spiral_fast.rollout.engine import EngineFailed

Item, Made = TypeVar("Item"), TypeVar("Made")

# How long a rank waits for the slowest: of a round's rollouts, or of an evaluation. A rank that died is noticed at
# once, by its closed connections and by torchrun; this is for one that hangs.
TIMEOUT = timedelta(hours=12)


def join(device_type: str) -> None:
    """Meet the other ranks. Objects and CPU tensors go over gloo, CUDA tensors over NCCL, each rank on the GPU of its
    LOCAL_RANK. Without torchrun there is nobody to meet."""
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)


def leave() -> None:
    """At the end of a run that joined."""
    if "RANK" in os.environ and dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over(tensor: torch.Tensor) -> torch.Tensor:
    """Add up `tensor` over the ranks, in place; every rank has the same bits afterwards."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def as_first(tensor: torch.Tensor) -> torch.Tensor:
    """Give `tensor` the values it has on rank 0, in place."""
    if size() > 1:
        dist.broadcast(tensor, 0)
    return tensor


def gather(value: Any) -> list[Any]:
    """What each rank gave, in the order of the ranks."""
    if size() == 1:
        return [value]
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, value)
    return gathered


def on_each(work: Callable[[], Made], *, among: int | None = None) -> list[Made | None]:
    """What `work()` makes on each rank, or on the first `among` alone, on every rank, in the order of the ranks. Inside
    `work` ranks must not meet.

    What it raises on some rank is raised on every one when all have finished; of several errors that of the lowest
    rank. Ctrl-C passes at once: the process ends, and with it those that wait for it."""
    if size() == 1:
        return [work()]
    made = error = None
    try:
        if rank() < (among or size()):
            made = work()
    except Exception as raised:
        error = raised
    parts = gather((made, _Carried.of(error) if error else None))
    for number, (_, carried) in enumerate(parts):
        if carried:
            raise error if number == rank() else carried.error(number)
    return [part for part, _ in parts]


def share_out(
    work: Callable[[list[Item]], list[Made]], items: Sequence[Item], *, among: int | None = None
) -> list[Made]:
    """`work(items)`, which gives one result an item, shared out: rank r works on items r, r + n, r + 2 n, ... of n
    ranks, or of `among`; a rank without items does not work. Every rank returns all results, in order. Errors are as
    in `on_each`."""
    if size() == 1:
        return work(list(items))
    n = min(among or size(), len(items))
    parts = on_each(lambda: work(list(items[rank() :: n])), among=n) if n else []
    results: list[Any] = [None] * len(items)
    for number in range(n):
        results[number::n] = parts[number]
    return results


def from_first(ask: Callable[..., Made], *args: Any) -> Made:
    """`ask(*args)` of rank 0, which alone is asked, on every rank; what it raises there is raised everywhere."""
    return on_each(lambda: ask(*args), among=1)[0]


def total(value: Any) -> Any:
    """The sum of what each rank gave, in the order of the ranks: the same bits on each."""
    first, *others = gather(value)
    return sum(others, first)


class RankLost(EngineFailed):
    """Another rank ended, or hangs, and with it the engine it samples with."""


@contextmanager
def others_alive() -> Iterator[None]:
    """Within, the end of a connection to another rank is RankLost, also where FSDP met it, amid a forward."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of its own
        if isinstance(error, EngineFailed) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        why = str(error).splitlines()[0].partition(". ")[0]
        raise RankLost(f"another rank ended while this one waited for it ({why})") from error


@dataclass(frozen=True)
class _Carried:
    """An exception on its way to other ranks. Not pickled as such: unpickling would call its class with other arguments
    than it was made with."""

    kind: type[Exception]
    args: tuple
    fields: dict[str, Any]

    @staticmethod
    def of(error: Exception) -> _Carried:
        carried = _Carried(type(error), error.args, {k: v for k, v in vars(error).items() if k != "__notes__"})
        try:
            pickle.loads(pickle.dumps(carried))
        except Exception:  # of a class or with a content that does not travel: its words do
            return _Carried(RuntimeError, (f"{type(error).__name__}: {error}",), {})
        return carried

    def error(self, number: int) -> Exception:
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.fields)
        error.add_note(f"raised on rank {number}")
        return error

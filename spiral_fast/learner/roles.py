"""Which adapter of the model serves a trace.

`model.policy: shared` has one for all. With `two_adapters` theta searches and phi aggregates (paper, Appendix B): a
trace of level 0 is sampled, scored and trained under the adapter "search", one of any higher level under "aggregation".
Both lie on one frozen base. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from spiral_fast.config import ConfigError
from spiral_fast.trace import SEARCH

P, T = ParamSpec("P"), TypeVar("T")

ADAPTERS = {"shared": ("default",), "two_adapters": ("search", "aggregation")}  # their names in peft, by model.policy
WEIGHTS = "adapter_model.safetensors"  # peft's file


class Roles:
    """The adapters of one model, and which of them its LoRA layers apply at present."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.active = self.names[0]

    @property
    def apart(self) -> bool:
        """Search and aggregation have an adapter each."""
        return len(self.names) > 1

    def of(self, level: int) -> str:
        """The adapter of traces of this level."""
        return self.names[0 if level == SEARCH else -1]

    def split(self, levels: Sequence[int]) -> dict[str, list[int]]:
        """Adapter -> indices of the `levels` it serves, for those that serve any."""
        found = {name: [i for i, level in enumerate(levels) if self.of(level) == name] for name in self.names}
        return {name: indices for name, indices in found.items() if indices}

    @contextmanager
    def serving(self, role: str | None) -> Iterator[None]:
        """Within, every forward of the model applies this adapter (None: the one at present)."""
        before, self.active = self.active, role or self.active
        try:
            yield
        finally:
            self.active = before

    def bound(self, function: Callable[P, T]) -> Callable[P, T]:
        """`function` under the adapter of now, whenever it is called: checkpointing runs a layer again in the backward,
        when another may be active."""
        role = self.active

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.serving(role):
                return function(*args, **kwargs)

        return run


def adapter_folders(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Where peft's files of each adapter are. One: in `folder` itself. Two: in its search/ and aggregation/, as peft
    lays several out; a folder of one adapter stands for both. Raises ConfigError for a folder of neither kind.
    """
    held = [name for name in ADAPTERS["two_adapters"] if (folder / name / WEIGHTS).is_file()]
    one = (folder / WEIGHTS).is_file()
    if len(names) > 1 and len(held) == len(names):
        return {name: folder / name for name in names}
    if one and not held:
        return dict.fromkeys(names, folder)
    if held and len(names) == 1:
        raise ConfigError(
            f"{str(folder)!r} holds an adapter for search and one for aggregation: it is of model.policy: two_adapters"
        )
    if held:
        raise ConfigError(f"{str(folder)!r} holds {', '.join(held)} alone; two_adapters needs {' and '.join(names)}")
    raise ConfigError(f"{str(folder)!r} is not a folder with an {WEIGHTS}")


def new_folders(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Where to write each adapter, so that `adapter_folders` finds it."""
    return {name: folder if len(names) == 1 else folder / name for name in names}

"""How long traces are: a stated law, or lengths that were measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spiral_fast.config import ConfigError, RolloutConfig
from spiral_fast.levels import level_name
from spiral_fast.trace import AGGREGATION, SEARCH

FORMS = "uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, fixed:TOKENS, a file, or a run's folder"

Law = Callable[[np.random.Generator, int], np.ndarray]  # how many -> (n,) int64 lengths, at least 1


@dataclass(frozen=True)
class Lengths:
    """Sampled tokens of a trace, by level (the highest stands for all above), before L_max cuts them."""

    laws: dict[int, Law]
    text: str  # as it is shown

    def sample(self, rng: np.random.Generator, level: int, n: int, most: int) -> np.ndarray:
        """(n,) int64. A trace above `most` (L_max) is cut there, as the sampler does."""
        return self.laws[min(level, max(self.laws))](rng, n).clip(1, most)


def usual_lengths(rollout: RolloutConfig) -> Lengths:
    """Uniform from an eighth of L_max to L_max."""
    above = [level.max_new_tokens for level in rollout.levels] or [rollout.aggregation_max_new_tokens]
    most = dict(enumerate([rollout.search_max_new_tokens, *above]))
    laws = {level: _law("", "uniform", [str(-(-tokens // 8)), str(tokens)]) for level, tokens in most.items()}
    return Lengths(laws, "uniform from an eighth of L_max to L_max")


def parse_lengths(text: str) -> Lengths:
    """Raises ConfigError."""
    kind, *numbers = text.split(":")
    if kind in ("uniform", "lognormal", "fixed"):
        law = _law(text, kind, numbers)
        return Lengths({SEARCH: law, AGGREGATION: law}, text)
    path = Path(text).expanduser()
    if path.is_dir():
        measured = _of_run(path)
    elif path.is_file():
        measured = _of_file(path)
    else:
        raise ConfigError(f"--lengths: {text!r} cannot be used: give {FORMS}")
    laws = {level: lambda rng, n, values=values: rng.choice(values, n) for level, values in measured.items()}
    means = ", ".join(f"{level_name(level)} {measured[level].mean():.0f}" for level in sorted(measured))
    return Lengths(laws, f"{text} (mean tokens of a trace: {means})")


def _law(text: str, kind: str, numbers: list[str]) -> Law:
    def bad(why: str) -> ConfigError:
        return ConfigError(f"--lengths: {text!r} cannot be used: {why}; give {FORMS}")

    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise bad("what follows the colon must be numbers") from None
    if len(values) != (1 if kind == "fixed" else 2) or not all(0 < value < 2**31 for value in values):
        raise bad(f"{kind} takes {'one number' if kind == 'fixed' else 'two numbers'} above 0")
    if kind == "uniform":
        low, high = map(int, values)
        if not 1 <= low <= high:
            raise bad("LOW must not be above HIGH")
        return lambda rng, n: rng.integers(low, high + 1, n)
    if kind == "lognormal":
        median, sigma = values
        return lambda rng, n: np.rint(median * np.exp(sigma * rng.standard_normal(n)).clip(max=2**31)).astype(np.int64)
    return lambda rng, n: np.full(n, int(values[0]))


def _of_file(path: Path) -> dict[int, np.ndarray]:
    """One whole number a line, of both levels; or JSON {"search": [...], "aggregation": [...]}."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith("{") else [int(line) for line in text.split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'--lengths: {str(path)!r} is neither one length a line nor JSON {{"search": [...], "aggregation": [...]}} '
            f"({error})"
        ) from None
    if isinstance(found, list):
        found = {"search": found, "aggregation": found}
    measured = {}
    for level, name in ((SEARCH, "search"), (AGGREGATION, "aggregation")):
        values = found.get(name)
        whole = isinstance(values, list) and values and all(type(v) is int and 0 < v < 2**31 for v in values)
        if not whole:
            raise ConfigError(f"--lengths: {str(path)!r}: {name} must be a list of whole numbers above 0")
        measured[level] = np.array(values)
    return measured


def _of_run(folder: Path) -> dict[int, np.ndarray]:
    from spiral_fast.record.trace_store import read_traces

    table = read_traces(folder, columns=["level", "length"])
    levels, lengths = table["level"].to_numpy(), table["length"].to_numpy().astype(np.int64)
    if not (levels == SEARCH).any():
        raise ConfigError(f"--lengths: {str(folder)!r} is not the folder of a run that stored traces")
    measured = {level: lengths[levels == level] for level in np.unique(levels).tolist()}
    return {AGGREGATION: measured[SEARCH]} | measured  # a run without aggregation says nothing else of it

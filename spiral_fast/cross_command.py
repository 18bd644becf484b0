"""`spiral-fast cross`: every search checkpoint with every aggregation checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spiral_fast.config import Config, ConfigError

BASE = "base"  # in place of an adapter: the model as the config loads it
LABEL = re.compile(r"[A-Za-z0-9.-]+")  # no underscore: it joins labels in file names


def parse_checkpoints(key: str, texts: Sequence[str]) -> dict[str, Path | None]:
    """`LABEL=ADAPTER` or `base` each; adapter folders by label, None for `base`. Raises ConfigError naming `key`."""
    found: dict[str, Path | None] = {}
    for text in texts:
        label, equals, folder = text.partition("=")
        folder = folder if equals else label
        if not equals and text != BASE:
            raise ConfigError(f"{key}: {text!r} is neither LABEL=ADAPTER nor {BASE}")
        if not LABEL.fullmatch(label):
            raise ConfigError(f"{key}: the label {label!r} may hold letters, digits, dots and hyphens only")
        if label in found:
            raise ConfigError(f"{key}: the label {label!r} is given twice")
        found[label] = None if folder == BASE else Path(folder)
    if not found:
        raise ConfigError(f"{key}: give at least one LABEL=ADAPTER, or {BASE} for the model itself")
    return found


def cross_pair(
    config: Config, search: dict[str, Path | None], aggregation: dict[str, Path | None], out: Path, resume: bool
) -> dict[str, Any]:
    """Sample the matrix, print it, write `out` and <out's stem>.svg; traces go to <out's stem>_traces/ as in `eval`.

    One model in memory; the engine forgets every key and value when adapters change. Raises ConfigError.
    """
    from rich.table import Table

    from spiral_fast.evaluate.cross import cross_traces, heat_map, sample_cross, summarise_cross
    from spiral_fast.evaluate.run import counter
    from spiral_fast.evaluate.sampling import Sampler
    from spiral_fast.evaluate.store import Store, holds_traces, identity
    from spiral_fast.evaluate.table import number
    from spiral_fast.evaluate_command import traces_folder
    from spiral_fast.learner.adapters import Adapters
    from spiral_fast.record.charts import svg
    from spiral_fast.record.console import Console
    from spiral_fast.record.files import refuse_unwritable, write_json, written_aside
    from spiral_fast.rewards import make_grader
    from spiral_fast.rollout.make_engine import make_engine
    from spiral_fast.set_up import set_up

    folder = traces_folder(out)
    picture = out.with_suffix(".svg")
    if picture == out:
        raise ConfigError(f"--out: {str(out)!r} is the plot's name; the numbers take another, for example cross.json")
    refuse_unwritable("--out", out.parent, longest_name=f".{out.name}_traces")
    if not resume:
        for file in (out, picture):
            if file.exists():
                raise ConfigError(f"--out: {str(file)!r} exists already; choose another --out")
        if holds_traces(folder):
            raise ConfigError(
                f"--out: {str(folder)!r} holds traces; go on with them: --resume; or choose another --out"
            )
    if not config.evaluate.rsa_shapes:
        raise ConfigError("evaluate.rsa.steps: 0 cannot be used: cross-pairing takes a step of the first shape")
    checkpoints = {"search": search, "aggregation": aggregation}
    for label in search.keys() & aggregation.keys():
        if search[label] != aggregation[label]:
            raise ConfigError(f"--aggregation: the label {label!r} stands for another adapter under --search")
    config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"lengths": []})})
    parts = set_up(config)
    problems = parts.problems.eval
    adapters = Adapters(parts.loaded, config.model.lora)
    for label, adapter in (search | aggregation).items():
        if adapter is not None:
            try:
                adapters.check(adapter)
            except ConfigError as error:
                raise ConfigError(f"--{'search' if label in search else 'aggregation'}: {label}={error}") from None
    named = {label: str(folder) if folder else config.model.adapter for label, folder in (search | aggregation).items()}
    roles = {role: list(labels) for role, labels in checkpoints.items()}
    store = Store(folder, identity(config, named, problems) | {"roles": roles})
    engine = make_engine(config, parts.loaded, say=lambda text: console.line(text))
    in_place, version = None, 0

    def use(label: str) -> None:
        nonlocal in_place, version
        if label != in_place:
            adapters.use((search | aggregation)[label])
            in_place, version = label, version + 1
        engine.set_policy(version)

    try:
        with make_grader(config) as grader, Console() as console:
            total = cross_traces(config, len(search), len(aggregation), len(problems))
            on_trace = counter(total, console.progress("cross-pairing"))

            def stored(traces: int) -> None:
                for _ in range(traces):
                    on_trace()

            sampler = Sampler(config, engine, parts.prompts, grader, on_trace)
            sample_cross(config, list(search), list(aggregation), problems, sampler, store, use, stored)
    finally:
        engine.close()
    result = summarise_cross(config, list(search), list(aggregation), problems, store)
    shown = Table("search by", "alone", *(f"aggregated by {label}" for label in aggregation))
    intervals = result["intervals"]
    for s in search:
        cells = [number(result["matrix"][s][a], intervals["matrix"][s][a]) for a in aggregation]
        shown.add_row(s, number(result["search_accuracy"][s], intervals["search_accuracy"][s]), *cells)
    write_json(out, result)
    with written_aside(picture) as aside:
        aside.write_text(svg(heat_map(result)))
    console.rich.print(shown)
    console.line(f"written to {out}")
    return result

"""`spiral-fast eval`: one evaluation of a model or of an adapter on it, in chunks of problems that are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from spiral_fast.config import Config, ConfigError


class Shard(NamedTuple):
    """Part `number` (1, 2, ...) of `of`: every `of`-th chunk of the problems."""

    number: int
    of: int


WHOLE = Shard(1, 1)


def parse_shard(text: str) -> Shard:
    """`2/4`. Raises ConfigError."""
    number, slash, of = text.partition("/")
    if slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
        return Shard(int(number), int(of))
    raise ConfigError(f"--shard: {text!r} is not of the form i/n with 1 <= i <= n, for example 1/4")


def traces_folder(out: Path) -> Path:
    if not out.name:
        raise ConfigError(f"--out: {str(out)!r} names no file")
    return out.with_name(f"{out.stem}_traces")


def evaluate_adapter(
    config: Config, adapter: Path | None, out: Path, *, resume: bool = False, shard: Shard = WHOLE
) -> dict[str, Any] | None:
    """Evaluate `adapter` (None: `model.adapter`, else the bare model), print a table, return the numbers.

    Every trace goes to <out's stem>_traces/, a file per `evaluate.chunk_problems` problems. Once all files are there,
    whoever sampled them, the numbers go to `out` and the figures beside it, <out's stem>_<metric>.svg; before that a
    shard returns None. `resume` goes on with the files there are. Each chunk begins with an empty cache, so that its
    traces do not depend on where an evaluation was interrupted or how it was split.

    Raises ConfigError when the adapter, `out` or the config cannot be used, before anything is sampled.
    """
    from spiral_fast.evaluate.measure import measure
    from spiral_fast.evaluate.plots import FIGURES, figures
    from spiral_fast.evaluate.run import counter
    from spiral_fast.evaluate.sampling import Sampler, n_traces
    from spiral_fast.evaluate.store import Store, chunks, holds_traces, identity
    from spiral_fast.evaluate.summary import summarise
    from spiral_fast.evaluate.table import table
    from spiral_fast.record.charts import svg
    from spiral_fast.record.console import Console
    from spiral_fast.record.files import refuse_unwritable, write_json, written_aside
    from spiral_fast.rewards import make_grader
    from spiral_fast.rollout.make_engine import make_engine
    from spiral_fast.set_up import set_up

    folder = traces_folder(out)
    pictures = {name: out.with_name(f"{out.stem}_{name}.svg") for name in FIGURES}
    refuse_unwritable("--out", out.parent, longest_name=f".{out.name}_{max(FIGURES, key=len)}")
    if not resume:
        for file in (out, *pictures.values()):
            if file.exists():
                raise ConfigError(f"--out: {str(file)!r} exists already; choose another --out")
        if shard.of == 1 and holds_traces(folder):
            raise ConfigError(
                f"--out: {str(folder)!r} holds traces; go on with them: --resume; or choose another --out"
            )
    if adapter is not None:
        if not adapter.is_dir():
            raise ConfigError(f"--adapter: {str(adapter)!r} is not a folder")
        config = config.model_copy(update={"model": config.model.model_copy(update={"adapter": str(adapter)})})
    parts = set_up(config)
    problems = parts.problems.eval
    label = adapter.name if adapter else "model"
    store = Store(folder, identity(config, {"evaluated": config.model.adapter}, problems))
    parts_of = [problems[part.start : part.stop] for part in chunks(len(problems), config.evaluate.chunk_problems)]
    mine = range(shard.number - 1, len(parts_of), shard.of)
    missing = [number for number in mine if not store.has(number)]
    if len(missing) < len(mine) and not resume:
        raise ConfigError(f"--out: {str(folder)!r} holds traces of this shard already; go on with them: --resume")
    engine = make_engine(config, parts.loaded, say=lambda text: console.line(text))
    try:
        with make_grader(config) as grader, Console() as console:
            per_problem = n_traces(config)
            sizes = {number: len(parts_of[number]) * per_problem for number in mine}
            total, there = sum(sizes.values()), sum(sizes[number] for number in mine if number not in missing)
            on_trace = counter(total, console.progress("evaluate"), there)
            sampler = Sampler(config, engine, parts.prompts, grader, on_trace)
            for number in missing:
                engine.set_policy(0)  # an empty cache
                store.write(number, sampler.everything(parts_of[number]))
    finally:
        engine.close()
    with store.alone():
        lacking = sum(not store.has(number) for number in range(len(parts_of)))
        if lacking:
            console.line(f"{lacking} of {len(parts_of)} chunks are missing in {folder}: the last shard writes {out}")
            return None
        measured = [measure(one, config) for i, part in enumerate(parts_of) for one in store.read(i, part, per_problem)]
        result = summarise(measured, config, 0)
        write_json(out, result)
        drawn = figures({label: result})
        for name, picture in pictures.items():
            if name in drawn:
                with written_aside(picture) as aside:
                    aside.write_text(svg(drawn[name]))
            else:  # an earlier evaluation of these traces may have drawn it
                picture.unlink(missing_ok=True)
    console.rich.print(table({label: result}))
    console.line(f"written to {out}")
    return result

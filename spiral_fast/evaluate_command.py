"""`spiral-fast eval`: one evaluation of a model or of an adapter on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spiral_fast.config import Config, ConfigError


def evaluate_adapter(config: Config, adapter: Path | None, out: Path) -> dict[str, Any]:
    """Evaluate `adapter` (None: `model.adapter`, else the bare model), print a table, return the numbers.

    Writes them to `out` and the figures beside it, <out's stem>_<metric>.svg. Raises ConfigError when the adapter,
    `out` or the config cannot be used, before anything is sampled.
    """
    from spiral_fast.evaluate import evaluate
    from spiral_fast.evaluate.plots import FIGURES, figures
    from spiral_fast.evaluate.table import table
    from spiral_fast.record.charts import svg
    from spiral_fast.record.console import Console
    from spiral_fast.record.files import refuse_unwritable, write_json, written_aside
    from spiral_fast.rewards import make_grader
    from spiral_fast.rollout.make_engine import make_engine
    from spiral_fast.set_up import set_up

    pictures = {name: out.with_name(f"{out.stem}_{name}.svg") for name in FIGURES}
    refuse_unwritable("--out", out.parent, longest_name=f".{out.name}_{max(FIGURES, key=len)}")
    for file in (out, *pictures.values()):
        if file.exists():
            raise ConfigError(f"--out: {str(file)!r} exists already; choose another --out")
    if adapter is not None:
        if not adapter.is_dir():
            raise ConfigError(f"--adapter: {str(adapter)!r} is not a folder")
        config = config.model_copy(update={"model": config.model.model_copy(update={"adapter": str(adapter)})})
    parts = set_up(config)
    engine = make_engine(config, parts.loaded)
    try:
        with make_grader(config) as grader, Console() as console:
            on_progress = console.progress("evaluate")
            result = evaluate(config, engine, parts.prompts, grader, parts.problems.eval, step=0, progress=on_progress)
    finally:
        engine.close()
    label = adapter.name if adapter else "model"
    console.rich.print(table({label: result}))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    for name, figure in figures({label: result}).items():
        with written_aside(pictures[name]) as aside:
            aside.write_text(svg(figure))
    console.line(f"written to {out}")
    return result

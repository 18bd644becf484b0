"""`spiral-fast verify`: the checks of spiral_fast/verify as a table and, if asked for, as JSON."""

from __future__ import annotations

import time
from pathlib import Path

from spiral_fast.config import Config, ConfigError

COLOURS = {"pass": "green", "fail": "bold red", "not applicable": "dim"}


def verify(config: Config, json: Path | None) -> bool:
    """Print the table; whether no check failed. Raises ConfigError where `train` would. Writes `json` alone."""
    from spiral_fast.record.console import Console
    from spiral_fast.record.files import refuse_unwritable, write_json
    from spiral_fast.rewards import make_grader
    from spiral_fast.set_up import set_up
    from spiral_fast.verify.run import run_checks
    from spiral_fast.verify.subject import Subject

    start = time.monotonic()
    if json is not None:
        if json.is_dir():
            raise ConfigError(f"--json: {str(json)!r} is a folder; name a file")
        refuse_unwritable("--json", json.parent)
    with make_grader(config):  # a reward function is imported and checked
        pass
    with Console() as console:
        parts = set_up(config)
        subject = Subject(config, parts)
        try:
            results = run_checks(subject, console.progress("verify"))
        finally:
            subject.close()
    seconds = time.monotonic() - start
    failed = [name for name, result in results.items() if result.status == "fail"]
    console.rich.print(_table(results))
    model = f"{config.model.path}, {config.model.dtype} on {subject.learner.device}"
    sample = f"{len(subject.traces)} traces of {len({trace.key.problem for trace in subject.traces})} problems"
    for part in (model, sample, subject.shortened):
        if part:
            console.line(f"  {part}")
    console.line(f"{len(failed)} of {len(results)} checks failed, {seconds:.0f} s")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        checks = [result.as_json(name) for name, result in results.items()]
        write_json(
            json,
            {"model": model, "sample": sample, "shortened": subject.shortened, "seconds": seconds} | {"checks": checks},
        )
    return not failed


def _table(results: dict):
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table("check", "", "figure", "tolerance", Column("on", overflow="fold"))  # ids and paths stay whole
    for name, result in results.items():
        status = f"[{COLOURS[result.status]}]{result.status}[/]"
        table.add_row(name, status, *map(escape, (result.figure, result.tolerance, result.note)))
    return table

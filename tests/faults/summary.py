"""One line for each fault: what was done, what the run said, and how long it took."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("sglang", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Fault:
    fault: str
    outcome: str  # what became of the run
    said: str  # by the run, one line
    detected_s: float  # from the fault to that line
    within_s: float | None  # what the config allows for that; None: the fault is no silence
    recovered_s: float | None = None  # from the fault until the server was used again

    def line(self) -> str:
        recovered = "" if self.recovered_s is None else f", recovered after {self.recovered_s:.1f} s"
        return f"{self.fault}: {self.outcome}; detected after {self.detected_s:.1f} s{recovered}"


def write(faults: list[Fault], folder: Path) -> None:
    """faults.md and faults.json; a fault of an earlier run that was left out in this one stays there."""
    file = folder / "faults.json"
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    before = json.loads(file.read_text()) if file.exists() else []
    rows = {row["fault"]: row for row in before}
    rows |= {fault.fault: asdict(fault) | {"date": date, "versions": versions} for fault in faults}
    file.write_text(json.dumps([*rows.values()], indent=1) + "\n")
    (folder / "faults.md").write_text(_page([*rows.values()]))


def _page(faults: list[dict]) -> str:
    lines = ["| fault | the run | detected, s | allowed, s | recovered, s | it said |", "|---|---|---|---|---|---|"]
    for fault in faults:
        within = "" if fault["within_s"] is None else f"{fault['within_s']:.0f}"
        recovered = "" if fault["recovered_s"] is None else f"{fault['recovered_s']:.1f}"
        cells = [fault["fault"], fault["outcome"], f"{fault['detected_s']:.1f}", within, recovered]
        said = fault["said"].replace("|", "\\|")
        lines.append(f"| {' | '.join(cells)} | `{said}` |")
    dates = ", ".join(sorted({fault["date"] for fault in faults}))
    versions = "; ".join(sorted({", ".join(map(" ".join, fault["versions"].items())) for fault in faults}))
    return PAGE.format(date=dates, versions=versions, table="\n".join(lines))


PAGE = """# Faults of SGLang servers

`make test-faults FAULTS=docs` wrote this page on {date}: {versions}; two busy CPU cores, no GPU. Each line is a
training of `configs/demo.yaml` (6 problems, 144 traces a step) on real server processes, disturbed in the middle of a
rollout. After each the test looks at what the run recorded: every problem of the step has all its traces, of one policy
version, whose log-probs computed anew from the checkpoint are those recorded; its credits are those of its rewards; and
no process is left that should not be.

{table}

*detected*: from the fault to the line the run printed; *allowed*: what `rollout.sglang.timeout_s` and
`start_timeout_s` of that run allow for it, to which the test adds half a minute for a busy machine; *recovered*: from
the fault until the server was used again with the current adapter.
"""

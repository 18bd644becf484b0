"""Writes the table of docs/hopper.md and docs/hopper.json: every Triton kernel compiled ahead of time for Hopper.

`python -m bench.hopper`; with names of operations (`python -m bench.hopper head_rows`) it prints those and writes
nothing. Needs no GPU. Exits with 1 where a kernel breaks a limit.
"""

from __future__ import annotations

import json
import sys

from bench.hopper.check import ROOT, SECOND, SECOND_FOLDER, TABLE, compile_under_each, faults
from bench.hopper.launches import STACK

PAGE = ROOT / "docs/hopper.md"
MARK = "<!-- written by `python -m bench.hopper` from here on -->\n"
COLUMNS = {
    "operation": "operation",
    "kernel": "kernel",
    "pointers": "tensors",
    "constants": "constants",
    "warps": "warps",
    "stages": "stages",
    "registers": "registers",
    "stack": "stack",
    "shared": "shared memory",
    "wgmma": "wgmma",
    "mma": "mma",
    "instructions": "instructions",
}


def tables(found: dict[str, list[dict]]) -> str:
    lines = []
    for release, rows in sorted(found.items()):
        lines += [f"\n## triton {release}\n", "| " + " | ".join(COLUMNS.values()) + " |", "| --- " * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(str(row[column]) for column in COLUMNS) + " |" for row in rows]
    lines += [f"\nStack of {kernel}: {reason}" for kernel, reason in sorted(STACK.items())]
    return "\n".join(lines).replace("*", "\\*") + "\n"


def main(only: list[str]) -> int:
    found = compile_under_each(only)
    print(tables(found).replace("\\*", "*"))
    if SECOND not in found:
        print(f"triton {SECOND} left out: pip install --target {SECOND_FOLDER} --no-deps triton=={SECOND}")
    if not only:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + tables(found))
    broken = [
        f"{row['kernel']} {row['constants']} (triton {t}): {'; '.join(faults(row))}"
        for t in found
        for row in found[t]
        if faults(row)
    ]
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

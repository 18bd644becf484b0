"""`spiral-fast prepare`: the problems of a config, filtered and split, as files with an account of what was done."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spiral_fast.config import Config, ConfigError, ProblemsConfig
from spiral_fast.problems.counts import count_lines
from spiral_fast.problems.filters import statement
from spiral_fast.problems.load import GENERATED, ProblemSets, eval_rows, load_problems, train_rows
from spiral_fast.problems.rows import Row
from spiral_fast.record.environment import version
from spiral_fast.record.files import refuse_unwritable, write_json, writing
from spiral_fast.trace import Problem

KEYS = ("id", "question", "answer")


def prepare(config: Config, out: Path) -> None:
    """Write `out` with train.jsonl, eval.jsonl and counts.json, whole or not at all; print the counts.

    The files are read again with problems.source: jsonl and id_field: id. Raises ConfigError, also when `out` exists.
    """
    source = config.problems
    if source.source in GENERATED:
        raise ConfigError(f"problems.source: {source.source!r} generates its problems; there is nothing to prepare")
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out: {str(out)!r} exists already; choose another folder")
    refuse_unwritable("--out", out.parent)
    sets = load_problems(config, lambda: _prompts(config))
    account = _account(config, sets)
    aside = out.with_name(f".{out.name}.tmp")
    with writing(out):
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed here
        try:
            aside.mkdir(parents=True)
            for name, problems in (("train", sets.train), ("eval", sets.eval)):
                (aside / f"{name}.jsonl").write_text("".join(map(_line, problems)), encoding="utf-8")
            write_json(aside / "counts.json", account)
            os.rename(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    for line in count_lines(sets.counts):
        print(line)
    print("filter:", *account["filter"])
    print(f"written to {out}; use it with")
    files = f"train_file: {out / 'train.jsonl'}, eval_file: {out / 'eval.jsonl'}"
    print(f"problems: {{source: jsonl, {files}, id_field: id, eval_size: {len(sets.eval)}}}")


def _prompts(config: Config):
    from spiral_fast.learner.model import load_tokenizer
    from spiral_fast.prompts import make_prompts

    return make_prompts(config, load_tokenizer(config.model.path))


def _line(problem: Problem) -> str:
    """A kept field that is named like one of ours gets `_of_source` behind its name."""
    kept = {f"{key}_of_source" if key in KEYS else key: value for key, value in problem.data.items()}
    row = {"id": problem.id, "question": problem.question, "answer": problem.answer} | kept
    return json.dumps(row, ensure_ascii=False) + "\n"


def _account(config: Config, sets: ProblemSets) -> dict[str, Any]:
    source = config.problems
    counted = source.filters.min_prompt_tokens or source.filters.max_prompt_tokens
    return {
        "counts": sets.counts,
        "filter": statement(source.filters),
        "evaluation": _evaluation(source, config.seed),
        "inputs": _inputs(config),
        "problems": source.model_dump(mode="json"),
        "prompt tokens counted by": config.model.path if counted else None,
        "spiral_fast": version("spiral-fast"),
    }


def _evaluation(source: ProblemsConfig, seed: int) -> str:
    if source.eval_file is not None or source.eval_hub.dataset is not None:
        name = source.eval_file or source.eval_hub.dataset
        rule = "refused" if source.contaminated == "refuse" else "taken out of the training problems"
        return f"The first {source.eval_size} rows of {name}, unfiltered; questions in both sets are {rule}."
    share = f"{source.eval_size} problems" if source.eval_fraction is None else f"a share of {source.eval_fraction}"
    return f"Held out after the filter: {share}, by a hash of the normalised question with seed {seed}."


def _inputs(config: Config) -> dict[str, dict[str, str]]:
    """sha256 of the bytes of each file, of the rows as JSON of a data set of the hub."""
    source, found = config.problems, {}
    if source.source == "hub":
        found["train"] = source.hub.model_dump() | {"sha256 of rows": _sha256_of_rows(train_rows(config))}
    else:
        found["train"] = {"file": source.train_file, "sha256": _sha256_of_file(source.train_file)}
    if source.eval_hub.dataset is not None:
        found["eval"] = source.eval_hub.model_dump() | {"sha256 of rows": _sha256_of_rows(eval_rows(config))}
    elif source.eval_file is not None:
        found["eval"] = {"file": source.eval_file, "sha256": _sha256_of_file(source.eval_file)}
    return found


def _sha256_of_file(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_rows(rows: Iterator[Row]) -> str:
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps(row.values, default=str).encode() + b"\n")
    return content.hexdigest()

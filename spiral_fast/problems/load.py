"""The training and the evaluation problems of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spiral_fast.config import Config, ConfigError
from spiral_fast.install import install_command
from spiral_fast.problems.chain_sum import chain_sums
from spiral_fast.problems.contamination import without_contamination
from spiral_fast.problems.filters import fitting_prompts, gradable, kept_rows
from spiral_fast.problems.hub import hub_rows
from spiral_fast.problems.jsonl import jsonl_rows
from spiral_fast.problems.parquet import parquet_rows
from spiral_fast.problems.parts import problem_stream
from spiral_fast.problems.rows import Row, eval_fields, problems_of, train_fields
from spiral_fast.problems.split import hold_out
from spiral_fast.trace import Problem

GENERATED = ("reasoning_gym", "chain_sum", "parts")


@dataclass(frozen=True)
class ProblemSets:
    train: Sequence[Problem]
    eval: Sequence[Problem]
    counts: dict[str, int]  # in words: rows read, taken out (by reason), train, eval


def load_problems(config: Config, make_prompts: Callable[[], Any] | None = None) -> ProblemSets:
    """The same config and files give the same problems in the same order.

    `make_prompts`: gives spiral_fast.prompts.Prompts; called only when a filter counts tokens. Raises ConfigError.
    """
    if config.problems.source in GENERATED:
        train, evaluation, counts = _generated(config)
    else:
        train, evaluation, counts = _from_rows(config, make_prompts)
    return ProblemSets(train, evaluation, dict(counts) | {"train": len(train), "eval": len(evaluation)})


def _generated(config: Config) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    source = config.problems
    if source.source == "parts":
        stream = problem_stream(config.seed, source.variable_length, "parts")
        evaluation = [next(stream) for _ in range(source.eval_size)]
        return [next(stream) for _ in range(source.train_size)], evaluation, {}
    if source.source == "chain_sum":
        sizes = source.train_size, source.eval_size
        train, evaluation, passed_over = chain_sums(config.seed, source.n_terms, source.n_digits, *sizes)
    else:
        try:
            from spiral_fast.problems.reasoning_gym import generated
        except ModuleNotFoundError:
            raise ConfigError(
                f"problems.source: reasoning_gym needs reasoning-gym; run: {install_command('train')}"
            ) from None
        train, evaluation, passed_over = generated(source, config.seed)
    return train, evaluation, {"duplicates passed over": passed_over}


def _from_rows(config: Config, make_prompts) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    source, filters, counts = config.problems, config.problems.filters, Counter()
    train = kept_rows(train_rows(config), train_fields(source), filters, counts)
    if filters.min_prompt_tokens or filters.max_prompt_tokens:
        train = fitting_prompts(train, make_prompts(), filters, counts)
    if filters.answer_parses:
        from spiral_fast.record.console import Console

        with Console() as console:
            train = gradable(train, config, counts, console.progress("reference answers"))
    if not train:
        reasons = "; ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"problems.filters: no training problem is left ({reasons}); loosen them")
    rows = eval_rows(config)
    if rows is None:
        size = source.eval_size if source.eval_fraction is None else None
        train, evaluation = hold_out(train, config.seed, size=size, fraction=source.eval_fraction)
        counts["held out of them"] = len(evaluation)
    else:
        all_rows = problems_of(rows, eval_fields(source))
        evaluation = all_rows[: source.eval_size]
        counts["evaluation rows read"] = len(all_rows)
        counts["evaluation rows not used"] = len(all_rows) - len(evaluation)  # those after the first eval_size
        train, dropped = without_contamination(train, evaluation, source.contaminated)
        if source.contaminated == "drop_from_train":
            counts["taken out: an evaluation problem asks the same"] = dropped
        if not train:
            raise ConfigError("problems.contaminated: every training problem is an evaluation problem too")
    return train, evaluation, counts


def train_rows(config: Config) -> Iterator[Row]:
    source = config.problems
    if source.source == "hub":
        return hub_rows(source.hub, "problems.hub")
    return (parquet_rows if source.source == "parquet" else jsonl_rows)(source.train_file)


def eval_rows(config: Config) -> Iterator[Row] | None:
    """None where evaluation problems are held out of the training rows."""
    source = config.problems
    if source.eval_hub.dataset is not None:
        return hub_rows(source.eval_hub, "problems.eval_hub")
    if source.eval_file is None:
        return None
    return (parquet_rows if source.eval_file.endswith(".parquet") else jsonl_rows)(source.eval_file)

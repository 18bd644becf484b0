"""Where problems come from, and the order in which a run draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spiral_fast.config import Config, ConfigError
from spiral_fast.problems.chain_sum import chain_sums
from spiral_fast.problems.draws import Draws
from spiral_fast.problems.jsonl import read_jsonl
from spiral_fast.problems.parts import problem_stream
from spiral_fast.trace import Problem

__all__ = ["Draws", "ProblemSets", "load_problems"]


@dataclass(frozen=True)
class ProblemSets:
    train: Sequence[Problem]
    eval: Sequence[Problem]
    counts: dict[str, int]  # train, eval, and what was passed over or left out on the way


def load_problems(config: Config) -> ProblemSets:
    """The training and evaluation problems of a run; the same config gives the same problems in the same order."""
    source = config.problems
    counts = {}
    if source.source == "jsonl":
        fields = dict(question_field=source.question_field, answer_field=source.answer_field, id_field=source.id_field)
        train = read_jsonl(source.train_file, **fields)
        rows = read_jsonl(source.eval_file, **fields)
        evaluation = rows[: source.eval_size]
        counts["eval_rows_not_used"] = len(rows) - len(evaluation)  # rows of eval_file after the first eval_size
        shared = {problem.question for problem in train} & {problem.question for problem in evaluation}
        if shared:
            first = next(problem for problem in evaluation if problem.question in shared)
            raise ConfigError(
                f"{source.eval_file}: {len(shared)} evaluation questions are training questions too (the first is "
                f"{first.id!r}); remove them from problems.train_file or problems.eval_file"
            )
    elif source.source == "chain_sum":
        train, evaluation, counts["duplicates_passed_over"] = chain_sums(
            config.seed, source.n_terms, source.n_digits, source.train_size, source.eval_size
        )
    else:
        stream = problem_stream(config.seed, source.variable_length, "parts")
        evaluation = [next(stream) for _ in range(source.eval_size)]
        train = [next(stream) for _ in range(source.train_size)]
    counts |= {"train": len(train), "eval": len(evaluation)}
    return ProblemSets(train, evaluation, counts)

"""Questions that stand in the training and in the evaluation set."""

from __future__ import annotations

from spiral_fast.config import ConfigError
from spiral_fast.problems.same_text import normalised
from spiral_fast.trace import Problem


def without_contamination(
    train: list[Problem], evaluation: list[Problem], contaminated: str
) -> tuple[list[Problem], int]:
    """(train without the evaluation's questions, how many rows that took out).

    `contaminated`: "refuse" raises ConfigError with the first pair, "drop_from_train" takes them out.
    """
    in_eval: dict[str, Problem] = {}
    for problem in evaluation:
        in_eval.setdefault(normalised(problem.question), problem)
    shared = [(problem, in_eval.get(normalised(problem.question))) for problem in train]
    pairs = [(problem, other) for problem, other in shared if other is not None]
    if pairs and contaminated == "refuse":
        problem, other = pairs[0]
        n_eval = len({other.id for _, other in pairs})
        how = "are the same word for word" if problem.question == other.question else "differ in spelling only"
        raise ConfigError(
            f"problems.contaminated: {len(pairs)} training problems ask what {n_eval} evaluation problems ask: the "
            f"first are {problem.id!r} and {other.id!r}, which {how}; take them out of the training file or set "
            "problems.contaminated: drop_from_train"
        )
    return [problem for problem, other in shared if other is None], len(pairs)

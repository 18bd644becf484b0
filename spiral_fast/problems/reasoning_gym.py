"""Any task of reasoning-gym by name: problems are generated, boxed answers are scored by the task's own scorer.

An answer is right when the scorer gives 1.0; its partial credit (an answer as part of a longer text) counts as wrong.
Some scorers run an answer as Python. Model output is never run: for those, an answer counts by what the scorer accepts
unrun, or is handed on only when it is plain arithmetic.

A scorer needs the generated entry, which holds more than JSON can; a grading process generates it again.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset  # at import, so that a grading process is warm

from spiral_fast.config import ConfigError, ProblemsConfig
from spiral_fast.rewards.boxed import last_box
from spiral_fast.trace import Problem

# Scorers that pass the answer to eval() for partial credit; 1.0 needs the exact text.
RUN_THE_ANSWER = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Scorers that pass the answer to sympy's parse_expr, which runs it as Python.
PARSE_THE_ANSWER = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
# Tasks that iterate over sets of text, or draw from the random numbers of the whole process.
NOT_REPRODUCIBLE = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note"}
)
NOT_THE_SAME = "problems.task: {!r} cannot be used: one seed does not always give the same problems; use another task"
FUNCTIONS = frozenset("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs".split())
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
FEWEST = 100  # problems in a round
FEWEST_NEW = 0.02  # share of a round's problems that must be new; below, the task is taken to be exhausted


def generated(problems: ProblemsConfig, seed: int) -> tuple[list[Problem], list[Problem], int]:
    """(train, eval, duplicates passed over). No question occurs twice; eval does not depend on `train_size`.

    Raises ConfigError for an unknown task, settings it does not take, and more problems than it has.
    """
    _check_task(problems.task)
    seen: set[str] = set()
    sets: dict[str, list[Problem]] = {}
    passed_over = 0
    for split, size in (("eval", problems.eval_size), ("train", problems.train_size)):
        sets[split] = found = []
        for problem, exhausted in _stream(problems, split, seed, size, seen):
            if exhausted:
                raise ConfigError(
                    f"problems.{split}_size: {size} cannot be used: {problems.task} with these settings gave only "
                    f"{len(found)} distinct problems more before it repeated itself; ask for fewer or change "
                    "problems.task_settings"
                )
            if problem is None:
                passed_over += 1
                continue
            found.append(problem)
            if len(found) == size:
                break
    _check_winnable(problems.task, sets["eval"][-1])
    return sets["train"], sets["eval"], passed_over


def check(
    question: str, answer: str, completion: str, finish_reason: str, data: dict[str, Any]
) -> tuple[float, str | None]:
    """Reward and extracted answer of a completion. For a grading process: scorers may take any time and memory."""
    boxed = last_box(completion)
    if not boxed:
        return 0.0, None
    entry = _again(data)
    if entry["question"] != question:
        raise RuntimeError(f"{data['task']} generates another problem in this process")
    return float(_scores(data, entry, boxed)), boxed


def _again(data: dict[str, Any]) -> dict[str, Any]:
    return _dataset(data["task"], json.dumps(data["settings"]), data["seed"], data["size"])[data["index"]]


def _scores(data: dict[str, Any], entry: dict[str, Any], answer: str) -> bool:
    task = data["task"]
    if task in RUN_THE_ANSWER:
        accepted = entry["metadata"]["valid_answers"] if task == "n_queens" else [entry["answer"]]
        return answer in [text.strip() for text in accepted]
    if task in PARSE_THE_ANSWER and not is_arithmetic(answer):
        return False
    dataset = _dataset(task, json.dumps(data["settings"]), data["seed"], data["size"])
    try:
        return dataset.score_answer(answer, entry) == 1.0
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the scorer cannot read the answer
        return False


def is_arithmetic(text: str) -> bool:
    """Whether it is an expression of numbers, one-letter names, + - * / ** and known functions, and nothing else."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, int | float):
                return False
        elif isinstance(node, ast.Name):
            if not (node.id in FUNCTIONS if id(node) in called else len(node.id) == 1 and node.id.isascii()):
                return False
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.keywords:
                return False
        elif not isinstance(
            node, ast.Expression | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.expr_context
        ):
            return False
    return True


def _stream(
    problems: ProblemsConfig, split: str, seed: int, size: int, seen: set[str]
) -> Iterator[tuple[Problem | None, bool]]:
    """(problem, False), (None, False) for one that was there before, and (None, True) when hardly any is new."""
    settings = problems.task_settings
    size, round = max(size, FEWEST), 0
    while True:
        of_round = int.from_bytes(hashlib.sha256(f"{split}/{seed}/{round}".encode()).digest()[:4], "big") >> 1
        dataset = _create(problems.task, settings, of_round, size)
        new = 0
        for index in range(size):
            entry = _entry(dataset, problems.task, index)
            question = entry["question"]
            if question in seen:
                yield None, False
                continue
            seen.add(question)
            new += 1
            place = {"task": problems.task, "settings": settings, "seed": of_round, "size": size, "index": index}
            yield Problem(f"{split}-{round}-{index}", question, _text(entry["answer"]), place), False
        if new < FEWEST_NEW * size:
            yield None, True
        round += 1


def _text(answer: Any) -> str:
    """ "" where a task has no one answer and only scores."""
    return "" if answer is None else str(answer)


def _create(task: str, settings: dict[str, Any], seed: int, size: int):
    try:
        return create_dataset(task, seed=seed, size=size, **settings)
    except Exception as error:  # of any class: each task checks its settings in its own way
        said = " ".join(str(error).split())
        names = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
        wrong = next((name for name in settings if name not in names), None)
        if wrong is not None:
            near = difflib.get_close_matches(wrong, names, n=1)
            said = f"no setting {wrong!r}; " + (f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}")
        raise ConfigError(f"problems.task_settings: {settings} cannot be used for {task}: {said}") from None


def _entry(dataset, task: str, index: int) -> dict[str, Any]:
    try:
        return dataset[index]
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"problems.task_settings: {task} cannot generate problem {index}: {said}") from None


@lru_cache(maxsize=8)
def _dataset(task: str, settings: str, seed: int, size: int):
    return create_dataset(task, seed=seed, size=size, **json.loads(settings))


def _check_task(task: str) -> None:
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"problems.task: {task!r} is no task of reasoning-gym; {hint}")
    if task in NOT_REPRODUCIBLE:
        raise ConfigError(NOT_THE_SAME.format(task))


def _check_winnable(task: str, problem: Problem) -> None:
    """A reference answer that the scorer does not accept once it is boxed makes every reward 0."""
    if _again(problem.data)["question"] != problem.question:  # it depends on what was generated before
        raise ConfigError(NOT_THE_SAME.format(task))
    if problem.answer and check(problem.question, "", f"\\boxed{{{problem.answer}}}", "stop", problem.data)[0] != 1:
        raise ConfigError(
            f"problems.task: {task!r} cannot be used: its scorer does not accept its own answer "
            f"{problem.answer[:80]!r} out of a box; use another task"
        )

from __future__ import annotations

import re
from itertools import islice

import pytest

from spiral_fast.config import Config, ConfigError
from spiral_fast.problems import ProblemSets, load_problems
from spiral_fast.problems.chain_sum import sum_stream
from spiral_fast.problems.parts import check, make_problem, parse, solves
from spiral_fast.prompts import make_prompts
from spiral_fast.prompts.parts import EOS, PartsPrompts
from spiral_fast.warm_start.chain_sum_examples import ChainSumExamples, worked_sum
from spiral_fast.warm_start.examples import make_examples
from spiral_fast.warm_start.parts_examples import PartsExamples
from spiral_fast.warm_start.parts_model import build_tokenizer
from tests.prompts.test_text import make_tokenizer

PARTS_PROMPTS = PartsPrompts(build_tokenizer())


class Spelled:
    """Prompts as characters, to read what an example says."""

    def search(self, problem):
        return [problem.question, "?"]

    def aggregation(self, problem, candidates):
        return [problem.question, *candidates, "!"]

    def completion(self, text):
        return [text, EOS]


def sums(count: int, kind: str, seed: int = 0, exclude=frozenset()):
    examples = ChainSumExamples(seed, 3, 1, 4, Spelled(), exclude)
    return [getattr(examples, kind)() for _ in range(count)]


def true_result(question: str) -> int:
    words = re.search(r": (.+) =$", question).group(1).split()
    total = int(words[0])
    for sign, number in zip(words[1::2], words[2::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
    return total


def box(text: str) -> int:
    return int(re.fullmatch(r".*\\boxed\{(-?\d+)\}", text).group(1))


def test_worked_sums_spelled_out():
    assert worked_sum([4, -3, 7]) == ("4 - 3 = 1. 1 + 7 = 8. \\boxed{8}", 8)
    assert worked_sum([4, -9, -7]) == ("4 - 9 = -5. -5 - 7 = -12. \\boxed{-12}", -12)
    assert worked_sum([4, -3, 7], slip=(0, 2)) == ("4 - 3 = 3. 3 + 7 = 10. \\boxed{10}", 10)
    assert worked_sum([5]) == ("\\boxed{5}", 5)


def test_search_examples_are_right():
    for (question, _), (text, eos) in sums(300, "search"):
        assert box(text) == true_result(question) and eos == EOS
        for left, sign, right, result in re.findall(r"(-?\d+) ([+-]) (\d+) = (-?\d+)\.", text):
            assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_aggregation_examples_audit_truly_and_hold_wrong_candidates():
    rights = []
    for prompt, (text, eos) in sums(300, "aggregation"):
        question, *candidates, _ = prompt
        assert box(text) == true_result(question) and eos == EOS and len(candidates) == 4
        verdicts = re.match(r"1 (\w+), 2 (\w+), 3 (\w+), 4 (\w+)\. ", text).groups()
        for verdict, (candidate, _) in zip(verdicts, candidates, strict=True):
            assert (verdict == "right") is (box(candidate) == true_result(question))
            rights.append(verdict == "right")
    assert 0.4 < sum(rights) / len(rights) < 0.6


def test_excluded_questions_do_not_occur_and_seeds_repeat():
    used = {example[0][0] for example in sums(50, "search")}
    assert not used & {example[0][0] for example in sums(50, "search", exclude=used)}
    assert sums(20, "aggregation") == sums(20, "aggregation") != sums(20, "aggregation", seed=1)


def test_the_sums_are_not_those_of_train_and_eval():
    pytest.importorskip("reasoning_gym")
    config = Config(run_dir="x", model={"path": "x"}, problems={"source": "chain_sum", "train_size": 3000})
    problems = load_problems(config)
    used = {problem.question for problem in [*problems.train, *problems.eval]}
    one_digit = [p.question for p in islice(sum_stream("warm_start", 0, 3, 1, 2), 400)]
    assert used & set(one_digit)  # the stream alone would give some of them
    examples = make_examples(config, Spelled(), problems)
    assert not used & {examples.search()[0][0] for _ in range(400)}


def test_a_prompt_limit_that_fits_the_problems_does_not_stop_the_longer_sums_of_the_examples():
    pytest.importorskip("reasoning_gym")
    config = Config(run_dir="x", model={"path": "x"}, problems={"source": "chain_sum", "train_size": 20})
    problems = load_problems(config)
    prompts = make_prompts(config, make_tokenizer(None))
    longest = prompts.max_prompt_tokens = max(len(prompts.search(problem)) for problem in problems.train)
    examples = make_examples(config, prompts, problems)
    lengths = [len(examples.search()[0]) for _ in range(100)]
    assert min(lengths) <= longest < max(lengths) and prompts.max_prompt_tokens == longest


def problem_of(prompt: list[int], variable: bool):
    words = PARTS_PROMPTS.decode(prompt).split()
    numbers = [tuple(int(word) for word in words[start : start + 4]) for start in (2, 7, 12)]
    return make_problem("p", tuple(numbers), variable)


@pytest.mark.parametrize("variable", [False, True])
def test_parts_examples_are_well_formed_honest_and_mixed(variable):
    examples = PartsExamples(0, variable, 4, PARTS_PROMPTS, exclude=set())
    solved = {"search": 0, "aggregation": 0}
    lengths = set()
    for kind in solved:
        for _ in range(300):
            prompt, completion = getattr(examples, kind)()
            problem = problem_of(prompt, variable)
            text = PARTS_PROMPTS.decode(completion)
            assert prompt[:16] == PARTS_PROMPTS.search(problem)[:-1] and completion[-1] == PARTS_PROMPTS.id_of[EOS]
            assert parse(text) is not None
            solved[kind] += check(problem, text, "stop")
            lengths.add(len(completion))
            words = text.split()
            for start in range(0, len(words), 6):
                label, first, value, second, last, mark = words[start : start + 6]
                part = tuple(problem.data["parts"]["ABC".index(label)])
                assert (mark == "Y") is solves(part, (first, second)) is (int(last) == part[3])
    assert 0.05 < solved["search"] / 300 < 0.35 < solved["aggregation"] / 300 < 0.85
    assert lengths == {19} if not variable else {19, 25, 31} < lengths <= set(range(19, 56, 6))


def test_informed_aggregation_takes_a_right_part_wherever_a_candidate_has_one():
    from spiral_fast.warm_start.parts_examples import Mixture, aggregation_example

    examples = PartsExamples(0, False, 4, PARTS_PROMPTS, exclude=set())
    for _ in range(200):
        prompt, completion = aggregation_example(
            examples.rng, PARTS_PROMPTS, next(examples.stream), 4, 0.3, Mixture(0, 0, 1)
        )
        problem, quoted = problem_of(prompt, False), PARTS_PROMPTS.decode(prompt[16:]).split()[:-1]
        candidates = [parse(" ".join(quoted[start + 1 : start + 19])) for start in range(0, len(quoted), 19)]
        written = parse(PARTS_PROMPTS.decode(completion))
        for index, part in enumerate(problem.data["parts"]):
            options = [candidate[index][-1] for candidate in candidates]
            assert written[index][-1] in options
            assert solves(part, written[index][-1]) is any(solves(part, choice) for choice in options)


def test_a_task_without_templates_is_refused():
    config = Config(run_dir="x", model={"path": "x"}, problems={"source": "jsonl"}, warm_start={"steps": 3})
    with pytest.raises(ConfigError, match="warm_start.steps: 3 cannot be used: .* problems.source: jsonl; set it to 0"):
        make_examples(config, Spelled(), ProblemSets([], [], {}))

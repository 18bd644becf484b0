"""An aggregation prompt quotes right boxed answers; only what the model writes itself is graded."""

from __future__ import annotations

import dataclasses

from spiral_fast.evaluate import evaluate
from spiral_fast.rewards.exact import ExactGrader
from tests.evaluate.max_game import AGGREGATION_ROLE, SILENT, MaxEngine, MaxPrompts, make_problem
from tests.evaluate.test_run import make_config


class SilentAggregator(MaxEngine):
    """Searches always find digit 1; an aggregation says nothing of its own."""

    def _complete(self, request):
        completion = super()._complete(request)
        says = SILENT if request.prompt[-1] == AGGREGATION_ROLE else 1
        return dataclasses.replace(completion, tokens=[says, *completion.tokens[1:]])


class Recording(ExactGrader):
    def __init__(self):
        super().__init__()
        self.texts = []

    def submit(self, problem, text, finish_reason):
        self.texts.append(text)
        return super().submit(problem, text, finish_reason)


def test_a_right_box_in_the_prompt_is_worth_nothing():
    engine, grader = SilentAggregator(), Recording()
    config = make_config(rsa={"steps": 1, "population": 4, "set_size": 2}, lengths=[1])
    result = evaluate(config, engine, MaxPrompts(), grader, [make_problem(1)], step=0)
    quoted = MaxPrompts().decode(list(engine.requests[-1].prompt[1:2]))
    verdict = ExactGrader().grade([(make_problem(1), quoted, "stop")])[0]
    assert verdict.verdict == "correct"  # were the prompt graded, every aggregation would be right
    assert result["rsa"] == [1.0, 0.0] and result["rsa_shapes"][0]["stages"][0]["no_answer_share"] == 1.0
    cell = result["rsa_shapes"][0]["verification"]["step_1"]["by_right_candidates"][2]
    assert cell["aggregations"] == 4 and cell["correct"]["share"] == 0.0
    assert set(grader.texts) == {r"\boxed{1}", "no idea"}

from __future__ import annotations

import pytest

from spiral_fast.config import ConfigError
from spiral_fast.problems.contamination import without_contamination
from spiral_fast.trace import Problem


def problems(name, *questions):
    return [Problem(f"{name}:{i}", question, "1") for i, question in enumerate(questions)]


TRAIN = problems("train", "A?", "what is  $2+2$", "B", "What is 2 + 2?", "b!")
EVAL = problems("eval", "C", "What is 2 + 2?", "a")


def test_the_first_pair_is_named_and_all_are_counted():
    with pytest.raises(ConfigError) as error:
        without_contamination(TRAIN, EVAL, "refuse")
    said = str(error.value)
    assert said.startswith(
        "problems.contaminated: 3 training problems ask what 2 evaluation problems ask: the first are "
    )
    assert "'train:0' and 'eval:2', which differ in spelling only" in said and "\n" not in said
    with pytest.raises(ConfigError, match="'train:0' and 'eval:1', which are the same word for word"):
        without_contamination(TRAIN[3:4] and problems("train", "What is 2 + 2?"), EVAL, "refuse")


def test_they_can_be_taken_out_of_training():
    kept, dropped = without_contamination(TRAIN, EVAL, "drop_from_train")
    assert [problem.id for problem in kept] == ["train:2", "train:4"] and dropped == 3


@pytest.mark.parametrize("contaminated", ["refuse", "drop_from_train"])
def test_clean_sets_pass_as_they_are(contaminated):
    train = problems("train", "4 - 3 =", "x = -3", "1.5")
    assert without_contamination(train, problems("eval", "4 + 3 =", "x = 3", "15"), contaminated) == (train, 0)

"""The user's own reward: found by name, called with five arguments, its result read."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from spiral_fast.config import Config, ConfigError, RewardConfig
from spiral_fast.rewards import NonFiniteReward, Verdict, make_grader
from spiral_fast.rewards.function import FunctionGrader
from spiral_fast.rewards.grading import Grading
from spiral_fast.trace import Problem, ProblemRollout, Trace, TraceKey

BEHAVIOURS = Path(__file__).with_name("behaviours.py")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def graded(function: str, *items, **reward) -> list[Verdict]:
    with FunctionGrader(RewardConfig(workers=1, **reward), function) as grader:
        return grader.grade(items)


def item(question: str = "q", answer: str = "7", text: str = "\\boxed{7}", data: dict | None = None, finish="stop"):
    return Problem("p", question, answer, data or {}), text, finish


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


LENGTH = "def length(question, answer, completion, finish_reason, data):\n    return len(completion)\n"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my_rewards.py", "my_rewards.length"),
        ("my_package/deep/my_rewards.py", "my_package.deep.my_rewards.length"),
        ("my_rewards.py", "my_rewards.py:length"),
        ("some/folder/my-rewards.py", "some/folder/my-rewards.py:length"),
        ("my_rewards.py", "my_rewards:length"),
    ],
)
def test_found_by_dotted_name_and_by_file(file, name):
    write(file, LENGTH)
    assert graded(name, item(text="abc")) == [Verdict(3.0, "correct", None)]


def test_a_file_imports_its_neighbours():
    write("folder/helper.py", "factor = 2.5\n")
    write("folder/mine.py", "from helper import factor\n\ndef reward(*arguments):\n    return factor\n")
    assert graded("folder/mine.py:reward", item())[0].reward == 2.5


def test_the_five_arguments():
    write("mine.py", "def reward(*arguments):\n    return 1.0, repr(arguments)\n")
    (verdict,) = graded("mine.reward", item("q", "a", "text é\n\ud800", {"unit": ["cm", 1, None]}, "length"))
    assert verdict.answer == repr(("q", "a", "text é\n\ud800", "length", {"unit": ["cm", 1, None]}))


def test_it_never_sees_the_prompt_nor_other_fields_of_the_trace():
    write(
        "mine.py",
        "def reward(question, answer, completion, finish_reason, data):\n    return float('BOX' in completion)",
    )
    assert graded("mine.reward", item("BOX", "BOX", "none", {"BOX": "BOX"}))[0].reward == 0.0


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("1", Verdict(1.0, "correct", "7")),
        ("True", Verdict(1.0, "correct", "7")),
        ("False", Verdict(0.0, "wrong", "7")),
        ("0.99", Verdict(0.99, "wrong", "7")),
        ("-2.5", Verdict(-2.5, "wrong", "7")),
        ("1e6", Verdict(1e6, "correct", "7")),
        ("(0.5, 'mine')", Verdict(0.5, "wrong", "mine")),
        ("(1.0, None)", Verdict(1.0, "correct", None)),
        ("(1.0, '')", Verdict(1.0, "correct", None)),
        ("__import__('numpy').float32(0.5)", Verdict(0.5, "wrong", "7")),
        ("__import__('numpy').array(7) == 7", Verdict(1.0, "correct", "7")),
        ("'1'", Verdict(0.0, "could_not_grade", "7", "TypeError: the reward returned str '1', not a number or")),
        ("None", Verdict(0.0, "could_not_grade", "7", "TypeError: the reward returned NoneType 'None', not a number")),
        (
            "(1.0, 7)",
            Verdict(0.0, "could_not_grade", "7", "TypeError: the reward returned tuple '(1.0, 7)': the answer"),
        ),
        ("[1.0]", Verdict(0.0, "could_not_grade", "7", "TypeError: the reward returned list '[1.0]', not a number")),
        ("10**400", Verdict(0.0, "could_not_grade", "7", "OverflowError: int too large to convert to float")),
        ("1 / 0", Verdict(0.0, "could_not_grade", "7", "ZeroDivisionError: division by zero")),
    ],
)
def test_what_a_reward_may_return(expression, verdict):
    write("mine.py", f"def reward(*_):\n    return {expression}\n")
    (found,) = graded("mine.reward", item())
    assert found[:3] == verdict[:3]
    assert found.reason.startswith(verdict.reason) and bool(found.reason) == bool(verdict.reason)


def test_the_reward_from_which_an_answer_is_correct():
    write("mine.py", "def reward(*arguments):\n    return float(arguments[2])\n")
    verdicts = graded("mine.reward", *[item(text=text) for text in ("0.49", "0.5", "2")], correct_at=0.5)
    assert [(v.reward, v.verdict) for v in verdicts] == [(0.49, "wrong"), (0.5, "correct"), (2.0, "correct")]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_stops_with_the_problems(number):
    write("mine.py", "def reward(question, answer, completion, finish_reason, data):\n    return float(completion)\n")
    reward = {"kind": "function", "function": "mine.reward", "workers": 1}
    config = Config.model_validate(
        {"run_dir": "x", "model": {"path": "m"}, "problems": {"source": "chain_sum"}, "reward": reward}
    )
    rollouts = []
    for draw, text in enumerate(["1.0", number]):
        trace = Trace(TraceKey(f"p{draw}", 0, -1, 0), [1], [1], None, "stop", 0, text)
        rollouts.append(ProblemRollout(Problem(f"p{draw}", "q", "a"), draw, [trace], [], []))
    with make_grader(config) as grader, pytest.raises(NonFiniteReward, match="'p1'.*mend reward.function") as error:
        Grading(grader).finish(rollouts)
    assert error.value.problems == ["p1"] and not math.isfinite(rollouts[1].search[0].reward)


def test_asynchronous_rewards_have_the_same_deadline_and_the_same_errors():
    data = [{}, {"reward": 0.5}, {"fail": True}, {"seconds": 600}, {}]
    verdicts = graded(f"{BEHAVIOURS}:asynchronous", *[item(data=d) for d in data], timeout_s=1)
    assert [v.reason for v in verdicts] == ["", "", "ValueError: too late", "no verdict within 1.0 s", ""]
    assert [(v.reward, v.answer) for v in verdicts[:2]] == [(1.0, "found it"), (0.5, "found it")]


def test_an_asynchronous_client_may_live_as_long_as_its_process():
    write(
        "mine.py",
        "import asyncio\nloops = set()\n\nasync def reward(*_):\n    loops.add(id(asyncio.get_running_loop()))\n"
        "    await asyncio.sleep(0)\n    return len(loops)\n",
    )
    assert [v.reward for v in graded("mine.reward", item(text="1"), item(text="2"))] == [1.0, 1.0]


def test_equal_arguments_are_graded_once():
    write("mine.py", "calls = 0\n\ndef reward(*_):\n    global calls\n    calls += 1\n    return calls\n")
    items = [
        item(),
        item(),
        item(finish="length"),
        item(data={"a": 1}),
        item(text="x"),
        item("r"),
        item(answer="8"),
        item(),
    ]
    assert sorted({v.reward for v in graded("mine.reward", *items)}) == [1, 2, 3, 4, 5, 6]


def test_data_that_cannot_travel_names_the_problem():
    write("mine.py", LENGTH)
    with pytest.raises(TypeError, match="data of the problem 'p'.*set is not JSON"):
        graded("mine.length", item(data={"a": {1, 2}}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.lenght", "mine has no 'lenght'; did you mean length?"),
        ("mine.py:lenght", "mine.py has no 'lenght'; did you mean length?"),
        ("mime.length", "there is no module 'mime'; did you mean "),
        ("my_package.mime.length", "there is no module 'my_package.mime'; did you mean my_package.mine?"),
        ("mime.py:length", "mime.py: no such file; did you mean mine.py?"),
        ("length", "'length' names no function; write my_module.my_function or path/to/file.py:my_function"),
        ("mine.NUMBER", "mine.NUMBER is a int, not a function"),
        (
            "mine.short",
            "mine.short takes (completion), but is called with (question, answer, completion, finish_reason",
        ),
        ("broken.length", "broken cannot be imported: ZeroDivisionError: division by zero"),
        ("broken.py:length", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
        ("needy.length", "needy cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ("unfinished.length", "unfinished cannot be imported: SyntaxError"),
        ("mine.py", "'mine.py' names no function; write my_module.my_function or path/to/file.py:my_function"),
        ("asyncio.py:length", "asyncio.py would hide Python's own module 'asyncio': give it another name"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name, message):
    write("mine.py", LENGTH + "\nNUMBER = 7\n\ndef short(completion):\n    return 1.0\n")
    write("my_package/mine.py", LENGTH)
    write("broken.py", "1 / 0\n")
    write("asyncio.py", LENGTH)
    write("needy.py", "import not_there\n")
    write("unfinished.py", "def length(\n")
    with pytest.raises(ConfigError) as error:
        graded(name, item())
    assert str(error.value).startswith(f"reward.function: {message}") and "\n" not in str(error.value)


def test_no_process_is_left_when_the_function_cannot_be_loaded():
    grader = FunctionGrader(RewardConfig(workers=2), "nowhere.reward")
    with pytest.raises(ConfigError):
        grader.__enter__()
    assert all(process.process.returncode is not None for process in grader._processes)


def test_the_module_is_imported_in_the_grading_processes_only():
    write("mine.py", f"import os\nassert os.getpid() != {os.getpid()}\n" + LENGTH)
    assert graded("mine.length", item(text="abc"))[0].reward == 3.0


def test_submitting_does_not_wait_for_the_verdict():
    with FunctionGrader(RewardConfig(workers=2), f"{BEHAVIOURS}:reward") as grader:
        verdicts = [grader.submit(*item("wait_for", data={"file": file})) for file in ("a", "b", "c")]
        assert not any(verdict.done() for verdict in verdicts)
        write("c", "")
        write("a", "")  # b keeps its process busy
        assert verdicts[0].result().reward == verdicts[2].result().reward == 1.0 and not verdicts[1].done()
        write("b", "")
        assert verdicts[1].result().reward == 1.0

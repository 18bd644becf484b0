from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

from spiral_fast.config import Config, ConfigError, ProblemsConfig
from spiral_fast.rewards import make_grader

gym = pytest.importorskip("reasoning_gym")
task = pytest.importorskip("spiral_fast.problems.reasoning_gym")


def make(name, train_size=4, eval_size=4, **settings):
    source = dict(source="reasoning_gym", task=name, task_settings=settings, train_size=train_size, eval_size=eval_size)
    return task.generated(ProblemsConfig(**source), 0)


def reward(problem, answer):
    data = json.loads(json.dumps(problem.data))  # as it comes to a grading process
    return task.check(problem.question, problem.answer, f"So \\boxed{{{answer}}}", "stop", data)[0]


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "n_queens", "binary_matrix", "number_sorting", "gcd"])
def test_the_reference_answer_in_a_box_is_right_and_no_other(name):
    train, evaluation, _ = make(name)
    for problem in train + evaluation:
        assert reward(problem, problem.answer) == 1
        assert reward(problem, f"the answer is {problem.answer}") == reward(problem, "nonsense") == 0
    assert task.check("q", "a", "no box", "stop", train[0].data) == (0.0, None)


def test_an_answer_of_ones_own_is_right_where_the_task_has_many():
    problem = make("countdown", 1, 1, min_numbers=3, max_numbers=3)[0][0]
    assert reward(problem, f"({problem.answer}) + 0 * 1") == 0  # numbers that are not given
    assert reward(problem, f" ( {problem.answer} ) ") == 1


def test_partial_credit_is_wrong():
    problem = make("n_queens", 1, 1)[0][0]
    board = str([row.split() for row in problem.answer.split("\n")])
    assert gym.get_score_answer_fn("n_queens")(board, {"metadata": {"valid_answers": [problem.answer]}}) == 0.5
    assert reward(problem, board) == 0


ATTACKS = [
    "open({path!r}, 'w').close()",
    "__import__('os').system('touch {path}')",
    "[open({path!r}, 'w')]",
    "().__class__.__base__.__subclasses__()",
    "sin('open({path!r}, chr(119))')",
    "(lambda: open({path!r}, 'w'))()",
    "exec('open({path!r}, chr(119))')",
]


@pytest.mark.parametrize("name", sorted((task.RUN_THE_ANSWER | task.PARSE_THE_ANSWER) - task.NOT_REPRODUCIBLE))
def test_no_answer_is_run(name, tmp_path):
    problem = make(name, 1, 1)[0][0]
    for attack in ATTACKS:
        assert reward(problem, attack.format(path=str(tmp_path / "ran"))) == 0
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["1", "-3.5", "(4+ 5)*2", "x**2/3 + C", "sin(2*x) - exp(x)", "9**9**9", "log(x, 2)", "1e3", "+-+3"]
)
def test_arithmetic(text):
    assert task.is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x.y",
        "x[0]",
        "f(x)",
        "sin",
        "sin('1')",
        "'a'",
        "x if y else z",
        "[x for x in y]",
        "x = 1",
        "x; y",
        "os",
        "1 < 2",
    ]
    + [
        "(lambda: 1)()",
        "sin(x)(y)",
        "sin(x, y=1)",
        "sin(*x)",
        "{1: 2}",
        "f'{x}'",
        "True",
        "1j",
        "x := 1",
        "await x",
        "\0",
    ]
    + ["(" * 500 + ")" * 500, "\u0661 + __import__"],
)
def test_what_is_no_arithmetic(text):
    assert not task.is_arithmetic(text)


def test_the_scorers_that_run_an_answer_are_all_known():
    """Reads the installed package: every task whose module runs text as Python is one that somebody has looked at."""
    runs = {"eval", "exec", "sympify", "parse_expr", "parse_latex", "literal_eval"}
    found = set()
    for name, (dataset, _) in task.DATASETS.items():
        tree = ast.parse(Path(inspect.getsourcefile(dataset)).read_text())
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if runs & {getattr(call, "id", getattr(call, "attr", None)) for call in calls}:
            found.add(name)
    # These run what they have generated themselves; the parser of propositional_logic is its own.
    own_text = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"}
    assert found - own_text == task.RUN_THE_ANSWER | task.PARSE_THE_ANSWER


def test_it_is_graded_in_processes_by_default():
    train, _, _ = make("countdown")
    source = dict(source="reasoning_gym", task="countdown")
    config = Config(run_dir="unused", model={"path": "m"}, problems=source, reward={"workers": 1})
    with make_grader(config) as grader:
        right = [(p, f"\\boxed{{{p.answer}}}", "stop") for p in train]
        wrong = [(p, "\\boxed{1 + 1}", "stop") for p in train]
        verdicts = grader.grade([*right, *wrong, (train[0], "none", "length")])
    assert [v.reward for v in verdicts] == [1.0] * 4 + [0.0] * 5
    assert [v.verdict for v in verdicts] == ["correct"] * 4 + ["wrong"] * 5
    assert verdicts[0].answer == train[0].answer and verdicts[-1].answer is None


def test_another_problem_in_the_grading_process_is_no_verdict():
    problem = make("gcd")[0][0]
    with pytest.raises(RuntimeError, match="gcd generates another problem in this process"):
        task.check("another question", "", "\\boxed{1}", "stop", problem.data)


def test_tasks_without_one_answer():
    problem = make("graph_color", 1, 1)[0][0]
    assert problem.answer == "" and reward(problem, "{}") == 0


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("countdwn", {}, "problems.task: 'countdwn' is no task of reasoning-gym; did you mean countdown"),
        ("zzzz", {}, "is no task of reasoning-gym; it has .*countdown.*"),
        ("ransom_note", {}, "'ransom_note' cannot be used: one seed does not always give the same problems"),
        ("list_functions", {}, "'list_functions' cannot be used: one seed does not always give the same problems"),
        ("gcd", {"max_valu": 5}, "problems.task_settings: .* no setting 'max_valu'; did you mean max_value?"),
        ("gcd", {"seed": 5}, "no setting 'seed'; it has min_numbers"),
        ("gcd", {"min_value": -5}, "problems.task_settings: .* cannot be used for gcd: "),
        ("composite", {}, "cannot be used for composite"),
    ],
)
def test_what_cannot_be_generated_is_one_line(name, settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        make(name, **settings)
    assert "\n" not in str(error.value)


def test_more_problems_than_there_are():
    small = dict(min_numbers=2, max_numbers=2, min_value=1, max_value=3)
    with pytest.raises(
        ConfigError, match=r"problems.train_size: 1000 cannot be used: gcd .* only \d distinct problems more"
    ):
        make("gcd", 1000, 2, **small)

"""Evaluations beside each other."""

from __future__ import annotations

import json
import re
from html import unescape

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import ConfigError
from spiral_fast.evaluate.bootstrap import bootstrap_interval
from spiral_fast.evaluate.compare import RESAMPLES, SEED, check_comparable, comparison_page, differences
from spiral_fast.evaluate.plots import figures
from spiral_fast.evaluate.read import read_evaluation
from spiral_fast.evaluate.table import lines, number, table
from spiral_fast.record.charts import svg
from tests.evaluate.max_game import make_problem
from tests.evaluate.test_run import PROBLEMS, make_config, run

SHAPES = [{"population": 8, "set_size": 4, "steps": 2}, {"population": 4, "set_size": 2, "steps": 1}]


@pytest.fixture(scope="module")
def evaluations() -> dict[str, dict]:
    one = make_config(lengths=[1], rsa=SHAPES)
    return {"base": run(one), "<i>spiral</i>": run(one.model_copy(update={"seed": 6})), "short": run(make_config())}


def test_differences_are_paired(evaluations):
    found = differences(evaluations)
    assert list(found) == ["<i>spiral</i>", "short"]
    base, other = evaluations["base"], evaluations["<i>spiral</i>"]
    values = np.array(
        [
            b["pass_at_k"]["4"] - a["pass_at_k"]["4"]
            for a, b in zip(base["per_problem"], other["per_problem"], strict=True)
        ]
    )
    assert found["<i>spiral</i>"]["pass@4"]["difference"] == pytest.approx(
        other["pass_at_k"]["4"] - base["pass_at_k"]["4"]
    )
    assert found["<i>spiral</i>"]["pass@4"]["interval"] == bootstrap_interval(values, RESAMPLES, SEED)
    step = found["<i>spiral</i>"]["RSA 4/2 step 1"]["difference"]
    assert step == pytest.approx(other["rsa_shapes"][1]["rsa"][1] - base["rsa_shapes"][1]["rsa"][1])
    assert "pass@1, first 1 tokens" not in found["short"] and "pass@1, first 1 tokens" in found["<i>spiral</i>"]
    assert "RSA 8/4 step 2" in found["short"]


def test_pairing_narrows_the_interval():
    """Two policies that differ by a constant on problems of very different difficulty."""
    rng = np.random.default_rng(0)
    hard = rng.random(50)

    def evaluation(shift: float) -> dict:
        none = {"majority_at_k": {}, "lengths": {}}
        return {"rsa_shapes": [], "per_problem": [{"pass_at_k": {"1": float(h + shift)}} | none for h in hard]}

    found = differences({"a": evaluation(0.0), "b": evaluation(0.125)})["b"]["pass@1"]
    assert found["difference"] == pytest.approx(0.125) and np.ptp(found["interval"]) < 1e-12


def test_other_problems_or_samples_are_refused(evaluations):
    check_comparable(evaluations)
    base = evaluations["base"]
    for other, message in (
        (run(make_config(), problems=PROBLEMS[:3]), "a and b are evaluations of different problems .4 and 3 of them."),
        (
            run(make_config(), problems=[*PROBLEMS[:3], make_problem(8, "d9")]),
            "the ids are the same, the questions or an",
        ),
        (run(make_config(samples=13)), "a has 12 search traces per problem, b 13: .* same evaluate.samples"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_comparable({"a": base, "b": other})


def test_the_page(evaluations, tmp_path):
    files = []
    for i, (label, evaluation) in enumerate(evaluations.items()):
        (tmp_path / f"{i}.json").write_text(json.dumps(evaluation))
        files.append(f"{label}={tmp_path / f'{i}.json'}")
    out = tmp_path / "new" / "page.html"
    result = CliRunner().invoke(app, ["compare", *files, "--out", str(out)])
    assert result.exit_code == 0 and result.stdout.strip() == str(out)
    page = out.read_text()
    assert "<i>" not in page and "&lt;i&gt;spiral" in page
    assert not re.search(r"(src|href)=|@import", re.sub(r'(xlink:)?href="#', "", page)) and "default-src 'none'" in page
    assert page.count("<svg") == 7
    base = evaluations["base"]
    for text in (f"{base['pass_at_k']['4']:.3f} [", "Differences to base", "RSA 4/2 step 1", "majority@3", "oracle"):
        assert text in page


def test_shapes_have_rows_of_their_own(evaluations):
    """A number of one shape never stands beside that of another, first shapes or not."""
    other = run(make_config(rsa=[{"population": 4, "set_size": 2, "steps": 1}]))
    rows = dict(lines({"a": evaluations["base"], "b": other}))
    assert rows["RSA 8/4 step 1"][1] == "" and rows["RSA 4/2 step 1"] == [
        number(e["rsa_shapes"][i]["rsa"][1], e["rsa_shapes"][i]["intervals"][1])
        for i, e in ((1, evaluations["base"]), (0, other))
    ]
    verification = figures({"a": evaluations["base"], "b": other})["verification"].axes[0]
    assert "(RSA, all steps)" in verification.get_title()
    assert [text.get_text() for text in verification.get_legend().get_texts()] == ["a, RSA 8/4", "b, RSA 4/2"]


@pytest.mark.parametrize("label", ["_hidden", "$x$", r"a$\frac{$", "a\\$b$", "[/b]", "\u202e"])
def test_every_label_is_drawn_as_text(evaluations, label):
    for name, figure in figures({label: evaluations["base"], "b": evaluations["short"]}).items():
        assert f"{label.strip()}<" in unescape(svg(figure)).replace("\n", ""), name


def test_the_console_shows_markup_as_text(evaluations):
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table({"[/b]": evaluations["base"], "[red]x": evaluations["base"]}))
    assert "[/b]" in shown.get() and "[red]x" in shown.get()


def test_an_evaluation_has_one_color_in_all_figures(evaluations):
    base = evaluations["base"]
    for n in (3, 6, 20):
        drawn = figures({f"l{i}": base for i in range(n)})
        last = {name: drawn[name].axes[0].get_lines()[-1].get_color() for name in ("pass_at_k", "rsa", "lengths")}
        assert len(set(last.values())) == 1
        budget = {line.get_color() for line in drawn["budget_generated"].axes[0].get_lines()}
        assert len(budget) == (n if n < 5 else 2) and last["rsa"] in budget
        colors = [line.get_color() for line in drawn["pass_at_k"].axes[0].get_lines()]
        assert len(set(colors)) == n
        assert len(drawn["pass_at_k"].axes[0].get_legend().get_texts()) == n


def test_the_page_says_which_are_left_out_of_a_figure(evaluations):
    def page(n: int) -> str:
        return comparison_page({f"l{i}": evaluations["base"] for i in range(n)})

    assert "show the first and the last of the 5" in page(5) and "the first and the last" not in page(4)


def test_a_damaged_file_is_one_line(evaluations, tmp_path):
    """Every key that a page needs, and every kind of content that it cannot show."""
    file = tmp_path / "a.json"
    base = json.loads(json.dumps(evaluations["base"]))
    file.write_text(json.dumps(base))
    assert read_evaluation(file) == base

    def refused(damage) -> str:
        other = json.loads(json.dumps(base))
        damage(other)
        file.write_text(json.dumps(other))
        with pytest.raises(ConfigError) as error:
            read_evaluation(file)
        message = str(error.value)
        assert message.startswith(f"{file}: is ") and "evaluate again" in message and "\n" not in message
        return message

    for key in base.keys() - {"step"}:
        assert f"({key}: field required)" in refused(lambda other, key=key: other.pop(key))
    for key, value in (("problems", "<img>"), ("samples", None), ("search_entropy", None), ("per_problem", [])):
        assert f"({key}: " in refused(lambda other, key=key, value=value: other.update({key: value}))
    assert "pass_at_k.x" in refused(lambda other: other["pass_at_k"].update(x=1.0))
    assert "not every problem" in refused(lambda other: other["per_problem"][1]["pass_at_k"].pop("4"))
    assert "not every problem" in refused(lambda other: other["per_problem"][1]["rsa_shapes"][0].pop())
    assert "not every problem" in refused(lambda other: other["intervals"]["majority_at_k"].pop("3"))
    assert "not every problem" in refused(lambda other: other["rsa_shapes"][1]["intervals"].pop())


def test_the_page_never_takes_the_place_of_an_evaluation(evaluations, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(evaluations["base"]))
    (tmp_path / "link").symlink_to(tmp_path)
    for out, message in (
        (file, "is one of the evaluations"),
        (tmp_path / "link" / "a.json", "is one of the evaluations"),
        (tmp_path, "is a folder"),
        ("", "is a folder"),
    ):
        result = CliRunner().invoke(app, ["compare", f"a={file}", "--out", str(out)])
        assert result.exit_code == 2 and message in result.stderr
    assert json.loads(file.read_text()) == evaluations["base"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base"], "'base' is not of the form LABEL=eval.json"),
        (["a={file}", "a={file}"], "the label 'a' is given twice"),
        (["a={folder}/none.json"], "cannot be read (No such file"),
        (["a={folder}/bad.json"], "is not what spiral-fast eval writes today (the whole: "),
    ],
)
def test_mistakes_are_one_line(words, message, evaluations, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(evaluations["base"]))
    (tmp_path / "bad.json").write_text("[1]")
    words = [word.format(file=tmp_path / "a.json", folder=tmp_path) for word in words]
    result = CliRunner().invoke(app, ["compare", *words, "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 2 and message in result.stderr and not (tmp_path / "page.html").exists()

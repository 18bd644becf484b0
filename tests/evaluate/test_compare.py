"""Evaluations beside each other."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import ConfigError
from spiral_fast.evaluate.bootstrap import bootstrap_interval
from spiral_fast.evaluate.compare import RESAMPLES, SEED, check_comparable, differences
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
        rows = [{"id": str(p), "pass_at_k": {"1": float(h + shift)}, "rsa_shapes": []} for p, h in enumerate(hard)]
        return {"per_problem": rows}

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base"], "'base' is not of the form LABEL=eval.json"),
        (["a={file}", "a={file}"], "the label 'a' is given twice"),
        (["a={folder}/none.json"], "cannot be read (No such file"),
        (["a={folder}/bad.json"], "is not what spiral-fast eval writes"),
    ],
)
def test_mistakes_are_one_line(words, message, evaluations, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(evaluations["base"]))
    (tmp_path / "bad.json").write_text("[1]")
    words = [word.format(file=tmp_path / "a.json", folder=tmp_path) for word in words]
    result = CliRunner().invoke(app, ["compare", *words, "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 2 and message in result.stderr and not (tmp_path / "page.html").exists()

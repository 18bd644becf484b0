from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser

import pytest
import yaml

from spiral_fast.config import ConfigError
from spiral_fast.record.charts import CHARTS
from spiral_fast.record.report import write_report
from tests.record.run_of_three_steps import config_of, make_run
from tests.record.test_trace_store import as_an_older_version


class Page(HTMLParser):
    """Tags, attributes that could load something, and the text of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(html)
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "onerror")]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "finished")


def read(run) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    return Page(path.read_text())


def test_headline_charts_and_traces(finished):
    page = read(finished)
    assert "incomplete" not in page.text
    for cell in ("pass@1", "0.200 [0.150, 0.250]", "0.300 [0.250, 0.350]", "+0.100", "RSA step 1", "75.0%"):
        assert cell in page.text
    assert "4 problems, 8 search traces each" in page.text and "95% bootstrap" in page.text
    for title in ("Reward by level", "Problems per step", "Gradient norm", "Time by phase"):
        assert title in page.text
    assert page.tags.count("svg") == 6 + 3  # charts with data, figures of the evaluations
    assert "aggregation 1 of set 0 (search traces 0, 2)" in page.text and "search trace 2" in page.text
    assert "problem p<0>" in page.text and "Reference answer: 4<2" in page.text


def test_one_file_without_network_and_hostile_text_stays_text(finished):
    page = read(finished)
    assert all(link.startswith("#") for link in page.links), page.links
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text  # shown, not run


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_stopped_midway_says_so(tmp_path, steps):
    make_run(tmp_path / "run", steps, finished=False)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/sea')  # killed while writing
    page = read(tmp_path / "run")
    assert f"incomplete: it made {steps} of 3 steps; the evaluation after is missing" in page.text
    assert ("Reward by level" in page.text) == bool(steps)


def test_a_run_killed_before_anything_was_measured(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of(tmp_path).model_dump(mode="json")))
    assert "it made 0 of 3 steps" in read(tmp_path).text


def test_skipped_steps_and_a_wide_gap_are_pointed_out(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= {"skipped": "loss is nan", "skipped_problems": ["p<7>", "p8"]}
    rows[1] |= {"skipped": "no live row", "skipped_problems": [], "logp_gap/mean": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = read(run).text
    assert "2 steps made no update: step 1: loss is nan (problems p<7>, p8) step 2: no live row" in text
    assert "In 1 steps (first: 2)" in text


def test_what_cannot_be_summed_is_not(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"time/peak_rss_mb": 700.0, "problems/epoch": 0.5, "memory/peak_rss_mb": 700.0}  # the last: older runs
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = read(run)
    totals = page.text[page.text.index("Totals over the steps") : page.text.index("Training")]
    assert "time/step" in totals and "peak" not in totals and "epoch" not in totals
    assert "MB, peak so far" in page.text


def test_a_run_of_an_older_version(tmp_path):
    run = make_run(tmp_path / "run")
    for file in (run / "traces").iterdir():
        as_an_older_version(file)
    page = read(run)
    assert "aggregation 1 of set 0 (search traces 0, 2)" in page.text


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("{\n" + file.read_text())
    with pytest.raises(ConfigError, match="metrics.jsonl, line 1: not JSON"):
        write_report(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b""),
        ("config.yaml", b"a: [1"),
        ("config.yaml", b"seed: 1\nmodel: builtin\n"),
        ("config.yaml", b"\xff\xfe"),
        ("environment.json", b"[]"),
        ("replay.json", b"{}"),
        ("eval_before.json", b""),
        ("eval_before.json", b"{}"),
        ("eval_before.json", b'{"pass_at_k": '),
        ("metrics.jsonl", b"[1]\n{}\n"),
        ("traces/step_000003.parquet", b"PAR1"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(finished, tmp_path, name, content):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        write_report(tmp_path / "run")
    assert str(error.value).startswith(str(tmp_path / "run" / name)) and "\n" not in str(error.value)


def test_clipping_and_pruning_are_told(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, clipped in zip(rows, (1.0, 0.0, 1.0), strict=True):
        row |= {"grad/clipped": clipped, "tokens/learner_logical": 100, "tokens/learner_computed": 40}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = " ".join(read(tmp_path / "run").text.split())
    assert "steps with a clipped gradient 66.7% of 3" in text
    assert "learner tokens not computed: prefixes, dead rows 60.0%" in text
    assert "prompt tokens not computed: shared prefixes 75.0%" in text
    assert "clipped" not in read(finished).text  # older runs lack the metric


def test_no_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)


def test_chart_titles_are_distinct():
    assert len({chart.title for chart in CHARTS}) == len(CHARTS)

"""Cross-pairing on a game where each checkpoint's part is known, and on the shipped model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spiral_fast.config import ConfigError, load_config
from spiral_fast.cross_command import cross_pair, parse_checkpoints
from spiral_fast.evaluate.bootstrap import bootstrap_interval
from spiral_fast.evaluate.cross import cross_traces, heat_map, sample_cross, summarise_cross
from spiral_fast.evaluate.rsa import rsa_sets
from spiral_fast.evaluate.sampling import Sampler
from spiral_fast.evaluate.store import Store
from spiral_fast.evaluate_command import evaluate_adapter
from spiral_fast.learner.model import load_model
from spiral_fast.rewards.exact import ExactGrader
from tests.evaluate.max_game import SEARCH_ROLE, SILENT, MaxEngine, MaxPrompts
from tests.evaluate.test_run import PROBLEMS, guesses, make_config


class Checkpoints(MaxEngine):
    """Searching, "up" guesses one digit higher than "base"; aggregating, it says the smallest."""

    label = ""

    def _complete(self, request):
        completion = super()._complete(request)
        digit, *quoted, role = request.prompt
        says = completion.tokens[0]
        if self.label == "up" and role == SEARCH_ROLE and says != SILENT:
            says = min(says + 1, digit)
        elif self.label == "up" and role != SEARCH_ROLE:
            says = min(quoted)
        return dataclasses.replace(completion, tokens=[says, *completion.tokens[1:]])


def sampled(tmp_path, config, search, aggregation, store=None):
    engine, done, skipped = Checkpoints(), [], []
    sampler = Sampler(config, engine, MaxPrompts(), ExactGrader(), lambda: done.append(engine.label))
    store = store or Store(tmp_path / "traces", {})
    used = []

    def use(label):
        engine.label = label
        used.append(label)

    sample_cross(config, search, aggregation, PROBLEMS, sampler, store, use, skipped.append)
    return summarise_cross(config, search, aggregation, PROBLEMS, store), engine, done, sum(skipped), used


def test_every_cell_by_hand(tmp_path):
    config = make_config(rsa={"steps": 3, "population": 8, "set_size": 3}, chunk_problems=3)
    names = ["base", "up"]
    result, engine, done, _, used = sampled(tmp_path, config, names, names)
    searches = [request for request in engine.requests if request.prompt[-1] == SEARCH_ROLE]
    assert len(searches) == 2 * 4 * 8  # of each search checkpoint once, whatever the number of aggregators
    assert len(done) == len(engine.requests) == cross_traces(config, 2, 2, 4) == 6 * 4 * 8
    assert used == ["base"] * 2 + ["up"] * 2 + ["base"] * 4 + ["up"] * 4  # each chunk begins with an empty cache

    values = {}
    for s in names:
        alone = []
        for a in names:
            shares = []
            for problem in PROBLEMS:
                digit = int(problem.answer)
                population = guesses(problem, 8)
                if s == "up":
                    population = [g if g == SILENT else min(g + 1, digit) for g in population]
                alone.append(np.mean([g == digit for g in population]))
                says = []
                for members in rsa_sets(8, 3, 5, problem.id, 1):
                    quoted = [population[i] for i in members]
                    heard = [q for q in quoted if q != SILENT]
                    says.append(min(quoted) if a == "up" else max(heard, default=SILENT))
                shares.append(np.mean([g == digit for g in says]))
            values[s, a] = np.array(shares)
            assert result["matrix"][s][a] == pytest.approx(np.mean(shares))
            assert result["intervals"]["matrix"][s][a] == bootstrap_interval(np.array(shares), 200, 5)
        assert result["search_accuracy"][s] == pytest.approx(np.mean(alone))
    effect = result["aggregation_effect"]["up"]["up"]
    assert effect["difference"] == pytest.approx(np.mean(values["up", "up"] - values["up", "base"]))
    assert effect["interval"] == bootstrap_interval(values["up", "up"] - values["up", "base"], 200, 5)
    effect = result["search_effect"]["up"]["base"]
    assert effect["interval"] == bootstrap_interval(values["up", "base"] - values["base", "base"], 200, 5)
    assert list(result["search_effect"]) == ["up"] and list(result["aggregation_effect"]["base"]) == ["up"]
    assert len({round(v, 6) for row in result["matrix"].values() for v in row.values()}) == 4
    assert result["per_problem"][2]["matrix"]["up"]["base"] == values["up", "base"][2]
    assert json.loads(json.dumps(result, allow_nan=False)) == result

    for s in names:  # the aggregators of a row read the same sets
        cells = {a: result["verification"][s][a]["by_right_candidates"] for a in names}
        assert [c["aggregations"] for c in cells["base"]] == [c["aggregations"] for c in cells["up"]]
        for a in names:
            right = sum(c["aggregations"] * (c["correct"]["share"] or 0) for c in cells[a])
            assert right / (4 * 8) == pytest.approx(result["matrix"][s][a])

    texts = [text.get_text() for text in heat_map(result).axes[0].texts]
    assert len(texts) == 6 and texts[1].startswith(f"{result['matrix']['base']['base']:.3f}\n[")


def test_what_is_stored_is_not_sampled_again(tmp_path):
    config = make_config(rsa={"steps": 1, "population": 4, "set_size": 2}, chunk_problems=3)
    whole = sampled(tmp_path, config, ["base", "up"], ["up"])[0]
    for name in ("search_up_000001", "pair_base_up_000000"):
        (tmp_path / "traces" / f"{name}.parquet").unlink()
    again, engine, done, skipped, _ = sampled(tmp_path, config, ["base", "up"], ["up"])
    assert again == whole and len(done) == 4 * (1 + 3) and skipped + len(done) == cross_traces(config, 2, 1, 4)


def test_checkpoints_are_parsed():
    assert {k: v and str(v) for k, v in parse_checkpoints("--search", ["base", "a=x/y", "b=base"]).items()} == {
        "base": None,
        "a": "x/y",
        "b": None,
    }
    for texts, message in (
        ([], "--search: give at least one"),
        (["x"], "--search: 'x' is neither LABEL=ADAPTER nor base"),
        (["a=x", "a=y"], "the label 'a' is given twice"),
        (["a/b=x"], "the label 'a/b' may hold letters"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_checkpoints("--search", texts)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of the demo's shape with weights of its own."""
    config = load_config("configs/demo.yaml")
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("adapter")
    model = load_model(config.model, "cpu").model
    model.save_pretrained(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    noise = torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        if "lora_B" in name:
            weight += 0.05 * torch.randn(weight.shape, generator=noise)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_a_cell_is_what_evaluating_that_adapter_gives(tmp_path, adapter):
    """On the diagonal the matrix is step 1 of that checkpoint's own evaluation: swapping leaves nothing behind."""
    settings = ["threads=1", "problems.eval_size=6", "problems.train_size=8", "evaluate.chunk_problems=3"]
    settings += [
        "evaluate={samples: 8, pass_at: [1], majority_at: [], rsa: {steps: 1}, bootstrap: 50, chunk_problems: 3}"
    ]
    config = load_config("configs/demo.yaml", settings)
    both = {"base": None, "other": adapter}
    result = cross_pair(config, both, both, tmp_path / "cross.json", False)
    assert (tmp_path / "cross.svg").read_text().startswith("<svg")
    for label, folder in both.items():
        own = evaluate_adapter(config, folder, tmp_path / f"{label}.json")
        assert [result["search_accuracy"][label], result["matrix"][label][label]] == own["rsa"]
    matrix = result["matrix"]
    assert matrix["base"]["base"] != matrix["base"]["other"] or matrix["base"]["base"] != matrix["other"]["base"]
    with pytest.raises(ConfigError, match="--out: .*cross.json' exists already"):
        cross_pair(config, both, both, tmp_path / "cross.json", False)
    assert cross_pair(config, both, both, tmp_path / "cross.json", True) == result


def test_adapters_that_do_not_fit_are_named(tmp_path, adapter):
    config = load_config("configs/demo.yaml", ["threads=1", "problems.eval_size=2", "problems.train_size=8"])
    with pytest.raises(ConfigError, match="--search: a='.*none' is not a folder with an adapter_model.safetensors"):
        cross_pair(config, {"a": tmp_path / "none"}, {"base": None}, tmp_path / "cross.json", False)
    rank = load_config("configs/demo.yaml", ["threads=1", "model.lora.rank=8", "problems.eval_size=2"])
    with pytest.raises(ConfigError, match="--aggregation: a=.*model.lora.rank is 8; set it to 16"):
        cross_pair(rank, {"base": None}, {"a": adapter}, tmp_path / "cross.json", False)
    with pytest.raises(ConfigError, match="the label 'a' stands for another adapter under --search"):
        cross_pair(config, {"a": None}, {"a": adapter}, tmp_path / "cross.json", False)
    with pytest.raises(ConfigError, match="evaluate.rsa.steps: 0 cannot be used"):
        off = load_config("configs/demo.yaml", ["evaluate.rsa.steps=0"])
        cross_pair(off, {"base": None}, {"base": None}, tmp_path / "cross.json", False)
    assert not (tmp_path / "cross.json").exists()


def test_the_plot_never_takes_the_place_of_the_numbers(tmp_path):
    config = load_config("configs/demo.yaml")
    with pytest.raises(ConfigError, match="--out: .*cross.svg' is the plot's name"):
        cross_pair(config, {"base": None}, {"base": None}, tmp_path / "cross.svg", False)

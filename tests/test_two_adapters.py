"""A run with two adapters from its first step to what it leaves: resume, replay, evaluation, cross-pairing, export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spiral_fast.config import ConfigError, load_config, refusals
from spiral_fast.cross_command import cross_pair
from spiral_fast.evaluate_command import evaluate_adapter
from spiral_fast.export import export
from spiral_fast.learner.model import load_model
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.replay import replay
from spiral_fast.resume import resumed_config
from spiral_fast.train import train
from tests.test_train import metrics, small, without_time

ROLES = ("search", "aggregation")
WEIGHTS = "adapter_model.safetensors"
EVERY_STEP = (
    "record={save_every: 1, checkpoint_every: 1}",
    "warm_start={steps: 2, search_examples: 2, aggregation_examples: 1}",
    "evaluate.chunk_problems=4",
)
PROMPT, TOKENS = [4, 9, 2, 7, 11], [3, 8, 5]

PLAIN = """
import json, sys
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

out, merged = sys.argv[1:]
prompt, tokens = json.load(sys.stdin)

def logps(model):
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

both = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out + "/base"), out + "/search", "search")
both.load_adapter(out + "/aggregation", "aggregation")
found = {"one": logps(AutoPeftModelForCausalLM.from_pretrained(out + "/aggregation"))}
for role in ("search", "aggregation"):
    both.set_adapter(role)
    found[role] = logps(both)
found["merged"] = logps(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
print(json.dumps(found))
"""


def settings(run: Path, *overrides: str):
    return small(run, *EVERY_STEP, *overrides, config="demo_two_adapters")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(settings(tmp_path_factory.mktemp("runs") / "two"))


def adapters(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {role: load_file(run / "checkpoints" / f"step_{step:06d}" / role / WEIGHTS) for role in ROLES}


def assert_same_checkpoint(a: Path, b: Path, step: int) -> None:
    for name in ("optimizer.safetensors", *(f"{role}/{WEIGHTS}" for role in ROLES)):
        left, right = (load_file(run / "checkpoints" / f"step_{step:06d}" / name) for run in (a, b))
        assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_both_are_trained_each_on_its_own_rows(run):
    steps = metrics(run)
    assert len(steps) == 2
    for step in steps:
        assert 0 <= step["logp_gap/max"] < 1e-4 and step["skipped"] is None
        assert step["grad/norm_search"] > 0 < step["grad/norm_aggregation"]
        assert "grad/cosine" not in step  # of terms that share no parameter
        both = np.hypot(step["grad/norm_search"], step["grad/norm_aggregation"])
        assert step["grad/norm"] == pytest.approx(both, rel=1e-6)
    before, after = adapters(run, 0), adapters(run, 2)
    for role in ROLES:
        assert any(not torch.equal(before[role][key], after[role][key]) for key in after[role])
    assert any(not torch.equal(after["search"][key], after["aggregation"][key]) for key in after["search"])


def test_resumed_it_goes_on_bit_for_bit(run, tmp_path):
    stopped = train(settings(tmp_path / "run", "learner.steps=1"))
    train(resumed_config(stopped, ["learner.steps=2"]), resume=True)
    assert without_time(stopped) == without_time(run)
    assert_same_checkpoint(stopped, run, 2)


def test_another_policy_cannot_go_on(run):
    with pytest.raises(ConfigError, match="^model.policy: 'shared' cannot be used with --resume: .* 'two_adapters'"):
        resumed_config(run, ["model.policy=shared"])


def test_replayed_the_same_adapters_come_out(run, tmp_path):
    again = replay(settings(tmp_path / "again"), run)
    assert_same_checkpoint(again, run, 2)


def test_evaluated_apart_it_has_the_numbers_of_the_run(run, tmp_path):
    config, folder = load_config(run / "config.yaml"), run / "checkpoints" / "step_000002"
    alone = evaluate_adapter(config, folder, tmp_path / "eval.json")
    of_run = json.loads((run / "eval_after.json").read_text())
    assert {key: alone[key] for key in ("pass_at_k", "majority_at_k", "rsa")} == {
        key: of_run[key] for key in ("pass_at_k", "majority_at_k", "rsa")
    }
    pairs = {"before": run / "checkpoints" / "step_000000", "after": folder}
    matrix = cross_pair(config, pairs, pairs, tmp_path / "cross.json", False)
    assert [matrix["search_accuracy"]["after"], matrix["matrix"]["after"]["after"]] == alone["rsa"]
    shared = config.model_copy(update={"model": config.model.model_copy(update={"policy": "shared"})})
    with pytest.raises(ConfigError, match="^model.adapter: .* it is of model.policy: two_adapters$"):
        evaluate_adapter(shared, folder, tmp_path / "shared.json")


def test_exported_for_plain_peft(run, tmp_path):
    folder = run / "checkpoints" / "step_000002"
    assert "adapters search and aggregation on " in export(run, tmp_path / "both")
    with pytest.raises(
        ConfigError, match="^--merged: .* two adapters, of which one model can hold one: name it, --role$"
    ):
        export(run, tmp_path / "merged", merged=True)
    assert "merged model" in export(run, tmp_path / "merged", merged=True, role="aggregation")
    export(run, tmp_path / "one", role="search")
    one = load_file(tmp_path / "one" / WEIGHTS)
    assert all(torch.equal(one[key], value) for key, value in adapters(run, 2)["search"].items())
    with pytest.raises(ConfigError, match="^--role: 'both' is neither search nor aggregation$"):
        export(run, tmp_path / "none", role="both")
    with pytest.raises(ConfigError, match="^--role: 'search' cannot be chosen: .* holds one adapter for both"):
        export(folder / "search", tmp_path / "none", role="search", config=run / "config.yaml")
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "both"), str(tmp_path / "merged")]
    done = subprocess.run(command, input=json.dumps([PROMPT, TOKENS]), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout.splitlines()[-1])
    model = load_config(run / "config.yaml").model.model_copy(update={"adapter": str(folder)})
    source = PolicySource(load_model(model, "cpu"))
    expected = {role: source.log_probs(PROMPT, TOKENS, 1.0, role) for role in ROLES}
    assert np.abs(expected["search"] - expected["aggregation"]).max() > 1e-4
    for name, role in [*zip(ROLES, ROLES, strict=True), ("one", "aggregation"), ("merged", "aggregation")]:
        np.testing.assert_allclose(plain[name], expected[role], rtol=0, atol=1e-5)


def test_both_may_start_from_one_adapter(run, tmp_path):
    config = load_config(run / "config.yaml")
    folder = run / "checkpoints" / "step_000002" / "search"
    loaded = load_model(config.model.model_copy(update={"adapter": str(folder)}), "cpu")
    weights = dict(loaded.model.named_parameters())
    for name, parameter in weights.items():
        if ".lora_" in name:
            assert parameter.requires_grad
            assert torch.equal(parameter, weights[name.replace(".aggregation.", ".search.")])


@pytest.mark.parametrize("algorithm", ["grpo", "poly_epo"])
def test_without_aggregation_there_is_nothing_for_a_second_adapter(algorithm):
    config = load_config(f"configs/demo_{algorithm}.yaml")
    model = config.model.model_copy(update={"policy": "two_adapters"})
    (refusal,) = refusals(config.model_copy(update={"model": model}))
    assert refusal.startswith(f"model.policy: 'two_adapters' cannot be used: {algorithm} samples no aggregation")

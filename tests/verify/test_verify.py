"""Each check on a sound run, and on one in which something real is broken: exactly that check fails."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from spiral_fast import verify_command
from spiral_fast.commands import app
from spiral_fast.config import Config, load_config
from spiral_fast.learner import learner as learner_module
from spiral_fast.learner.trees import TreeAttention
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.set_up import set_up
from spiral_fast.verify import memory
from spiral_fast.verify import subject as subject_module
from spiral_fast.verify.checks import CHECKS
from spiral_fast.verify.result import FAIL, Result
from spiral_fast.verify.run import run_checks
from spiral_fast.verify.subject import Subject

SMALL = [
    "run_dir=none",
    "problems.train_size=32",
    "problems.eval_size=4",
    "learner.micro_batch_tokens=1024",
    "threads=1",
]
BF16 = "model.dtype=bfloat16"
IN_FLOAT32 = {name for name in CHECKS if name.endswith("in float32")}


def small(*overrides: str) -> Config:
    return load_config("configs/demo.yaml", [*SMALL, *overrides])


def subject(*overrides: str) -> Subject:
    config = small(*overrides)
    return Subject(config, set_up(config))


def results(of: Subject) -> dict[str, Result]:
    return run_checks(of, lambda done, total: None)


def failed(of: Subject) -> set[str]:
    return {name for name, result in results(of).items() if result.status == "fail"}


def bits(of: Subject) -> dict[str, bytes]:
    parameters = of.loaded.model.named_parameters()
    return {name: p.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, p in parameters}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_run_passes_and_keeps_its_weights(dtype):
    sound = subject(f"model.dtype={dtype}")
    before = bits(sound)
    outcome = results(sound)
    assert outcome.keys() == CHECKS.keys()
    not_applicable = {"FSDP = plain"} | (IN_FLOAT32 if dtype == "float32" else set())
    assert {n: r.status for n, r in outcome.items()} == {
        n: "not applicable" if n in not_applicable else "pass" for n in CHECKS
    }
    for name, result in outcome.items():
        assert result.note and (name in not_applicable or (result.figure and result.tolerance and result.values))
        assert all(math.isfinite(value) for value in result.values.values())
    assert bits(sound) == before
    exact = outcome["engine = learner" if dtype == "float32" else "engine = learner in float32"]
    assert 0 < exact.values["max"] < 1e-4
    assert "aggregation traces" in exact.note and ", 0 aggregation" not in exact.note


def test_the_adapter_under_test_is_not_zero():
    """With a zero adapter every check would pass on a learner and an engine that both forget it."""
    sound = subject()
    seen = {}
    measure = sound.measure

    def look():
        seen.update({n: p.detach().norm().item() for n, p in sound.loaded.model.named_parameters() if "lora_B" in n})
        measure()

    sound.measure = look
    results(sound)
    assert seen and all(norm > 0 for norm in seen.values())
    assert not any(p.any() for n, p in sound.loaded.model.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize("weight", ["layers.0.self_attn.q_proj.base_layer", "layers.1.mlp.down_proj.lora_B.default"])
def test_an_engine_with_one_other_weight(weight):
    broken = subject()

    def engine_over_a_copy():
        loaded = copy.copy(broken.loaded)
        object.__setattr__(loaded, "model", copy.deepcopy(broken.loaded.model))
        with torch.no_grad():
            next(m for n, m in loaded.model.named_modules() if n.endswith(weight)).weight.mul_(1.02)
        return make_engine(broken.config, loaded)

    broken.new_engine = engine_over_a_copy
    assert failed(broken) == {"engine = learner"}


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_a_learner_at_another_temperature(factor):
    broken = subject()
    broken.learner.temperature *= factor
    assert failed(broken) == {"engine = learner"}


def test_what_16_bits_hide_shows_in_float32():
    broken = subject(BF16)
    broken.learner.temperature *= 1.05
    assert failed(broken) == {"engine = learner in float32"}


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_temperature_is_the_configs(temperature):
    assert failed(subject(f"rollout.temperature={temperature}")) == set()


def test_an_engine_that_keeps_the_cache_of_an_older_policy(monkeypatch):
    def keep(engine, version):
        engine._version, engine._watch = version, None

    monkeypatch.setattr(RadixEngine, "set_policy", keep)
    assert failed(subject()) == {"cached = cold"}
    assert failed(subject(BF16)) == {"cached = cold in float32"}


def test_an_engine_that_refuses_to_go_on_has_failed(monkeypatch):
    monkeypatch.setattr(RadixEngine, "set_policy", lambda engine, version: None)
    outcome = results(subject())["cached = cold"]
    assert outcome.status == "fail" and "weights or its active adapter changed under policy version" in outcome.note


def test_a_loss_that_is_a_mean_over_the_micro_batch(monkeypatch):
    per_token = learner_module._per_token

    def mean(values, packed, like):
        return per_token([value / len(packed.counts) for value in values], packed, like)

    for overrides in ((), (BF16,)):
        broken = subject(*overrides)
        with monkeypatch.context() as patch:
            patch.setattr(
                learner_module, "_per_token", lambda v, p, x: (mean if x.is_floating_point() else per_token)(v, p, x)
            )
            assert failed(broken) == {"split invariance"}


def test_a_tree_that_attends_wrongly(monkeypatch):
    for overrides, name in (((), "sharing invariance"), ((BF16,), "sharing invariance in float32")):
        broken = subject(*overrides)
        with monkeypatch.context() as patch:
            attend = TreeAttention.attend
            patch.setattr(
                TreeAttention, "attend", lambda self, layer, q, *rest, f=attend: f(self, layer, 1.05 * q, *rest)
            )
            assert name in failed(broken)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("1.0", "changed answer to '.*' is graded correct"),
        ("0.0", "reference answer '.*' is graded wrong"),
        ("float('nan')", "rewards nan and nan"),
    ],
)
def test_a_reward_that_grades_everything_alike(tmp_path, body, words):
    (tmp_path / "mine.py").write_text(
        f"def reward(question, answer, completion, finish_reason, data):\n    return {body}\n"
    )
    broken = subject("reward.kind=function", f"reward.function={tmp_path}/mine.py:reward")
    outcome = results(broken)
    assert {name for name, result in outcome.items() if result.status == "fail"} == {"reward round trip"}
    trip = outcome["reward round trip"]
    assert trip.figure == "36 of 36 wrong"
    assert re.search(words, trip.note) and "'parts-" in trip.note


def test_a_users_own_reward_passes(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from spiral_fast.problems.parts import check\nfrom spiral_fast.trace import Problem\n\n"
        "def reward(question, answer, completion, finish_reason, data):\n"
        "    return float(check(Problem('', question, answer, data), completion, finish_reason))\n"
    )
    assert failed(subject("reward.kind=function", f"reward.function={tmp_path}/mine.py:reward")) == set()


def test_a_cache_that_does_not_fit():
    outcome = results(subject("rollout.cache_tokens=1000000000000"))
    assert {name for name, result in outcome.items() if result.status == "fail"} == {"memory, largest step"}
    assert "a full cache takes" in outcome["memory, largest step"].note


PEAK = """
import sys
from tests.verify.test_verify import results, subject

print(results(subject(f"learner.micro_batch_tokens={sys.argv[1]}"))["memory, largest step"].values["peak"])
"""


def test_memory_grows_with_the_micro_batch():
    """A process each: this one may hold memory that earlier tests gave back to it."""
    peaks = []
    for tokens in (2048, 32768):
        command = [sys.executable, "-c", PEAK, str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        peaks.append(float(done.stdout.splitlines()[-1]))
    assert peaks[1] - peaks[0] > 30_720 * 1_000  # bytes: far more than 1 kB a token is kept for the backward


def test_a_slow_machine_does_less_and_says_so(monkeypatch):
    monkeypatch.setattr(subject_module, "ROLLOUT_S", 0.0)
    monkeypatch.setattr(subject_module, "GRADIENT_S", 0.0)
    monkeypatch.setattr(memory, "SECONDS", 0.05)
    slow = subject("learner.micro_batch_tokens=16384")
    outcome = results(slow)
    assert slow.shortened == "traces cut at 8 of 24 tokens" and len(slow.traces) == 12
    assert outcome["split invariance"].note.startswith("4 rows")
    assert "extrapolated from" in outcome["memory, largest step"].note
    assert not [name for name, result in outcome.items() if result.status == "fail"]


def test_grpo_has_no_aggregation():
    config = load_config("configs/demo_grpo.yaml", SMALL)
    outcome = results(Subject(config, set_up(config)))
    assert not [name for name, result in outcome.items() if result.status == "fail"]
    assert "and 0 aggregation traces" in outcome["engine = learner"].note


FSDP = """
import json, sys, torch
from spiral_fast.learner import fsdp
from tests.verify.test_verify import bits, results, subject

if sys.argv[1] == "broken":
    shard = fsdp.shard

    def shard_and_scale(policy, device, **options):
        shard(policy, device, **options)
        with torch.no_grad():
            fsdp.local(policy.layers[0].mlp.up_proj.base_layer.weight).mul_(1.02)

    fsdp.shard = shard_and_scale
outcome = results(subject("learner.fsdp=true", "learner.checkpointing=true", *sys.argv[2:]))
print(json.dumps({name: result.status for name, result in outcome.items()}))
"""


@pytest.mark.parametrize(("state", "dtype"), [("sound", "bfloat16"), ("broken", "float32")])
def test_fsdp(state, dtype):
    command = [sys.executable, "-c", FSDP, state, f"model.dtype={dtype}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["FSDP = plain"] == ("pass" if state == "sound" else "fail")
    assert [name for name, status in outcome.items() if status == "fail" and name != "FSDP = plain"] == []


def test_the_command_prints_a_table_and_writes_the_figures_alone(tmp_path, monkeypatch):
    config = tmp_path / "run.yaml"
    config.write_text(open("configs/demo.yaml").read())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["verify", str(config), *SMALL[1:], "--json", "out/figures.json"])
    assert done.exit_code == 0, done.output
    assert "engine = learner" in done.output and "pass" in done.output and "0 of 10 checks failed" in done.output
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["out", "out/figures.json", "run.yaml"]
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert [check["check"] for check in figures["checks"]] == list(CHECKS)
    assert figures["seconds"] > 0 and figures["model"] == "builtin:parts, float32 on cpu"


def test_a_failed_check_is_exit_code_1_and_a_wrong_config_2(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "memory_of", lambda device: 1_000_000)
    done = CliRunner().invoke(app, ["verify", "configs/demo.yaml", *SMALL])
    assert done.exit_code == 1 and "1 of 10 checks failed" in done.output
    done = CliRunner().invoke(app, ["verify", "configs/demo.yaml", "learner.stepz=1"])
    assert done.exit_code == 2 and "learner.stepz" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reward.kind=function", "reward.function=json.nothing"], "error: reward.function: json has no 'nothing'"),
        (["--json", "tests"], "error: --json: 'tests' is a folder; name a file"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_model_is_loaded(monkeypatch, arguments, words):
    import spiral_fast.set_up as set_up_module

    monkeypatch.setattr(set_up_module, "set_up", None)
    done = CliRunner().invoke(app, ["verify", "configs/demo.yaml", *SMALL, *arguments])
    assert done.exit_code == 2 and words in done.output


def test_the_note_of_a_failure_is_whole_on_a_narrow_page():
    name = "parts-" + "0123456789" * 12
    with Console(width=80, file=io.StringIO()) as page:
        page.print(verify_command._table({"reward round trip": Result(FAIL, "1 wrong", "0", f"{name}: wrong")}))
    assert name in re.sub(r"[^\w-]", "", page.file.getvalue())


def test_ctrl_c_is_one_line(tmp_path, monkeypatch):
    def interrupt(subject):
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "split invariance", interrupt)
    done = CliRunner().invoke(app, ["verify", "configs/demo.yaml", *SMALL, "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 130 and "error: interrupted; nothing was written" in done.output
    assert not list(tmp_path.iterdir())


def test_weights_that_have_diverged_are_one_line(tmp_path, monkeypatch):
    import spiral_fast.set_up as set_up_module

    def diverged(config):
        parts = set_up(config)
        with torch.no_grad():
            parts.loaded.causal_lm.get_decoder().norm.weight.fill_(torch.nan)
        return parts

    monkeypatch.setattr(set_up_module, "set_up", diverged)
    done = CliRunner().invoke(app, ["verify", "configs/demo.yaml", *SMALL])
    assert done.exit_code == 1 and "error: problem 'parts-" in done.output and "not finite" in done.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2(monkeypatch):
    """16 bits, a chat template, boxed answers; less of everything than the command does."""
    for name, seconds in (("ROLLOUT_S", 4.0), ("GRADIENT_S", 4.0)):
        monkeypatch.setattr(subject_module, name, seconds)
    monkeypatch.setattr(memory, "SECONDS", 4.0)
    config = load_config("configs/smollm2_cpu.yaml", ["problems.train_size=64", "threads=1"])
    outcome = results(Subject(config, set_up(config)))
    assert {name for name, result in outcome.items() if result.status != "pass"} == {"FSDP = plain"}
    assert outcome["engine = learner in float32"].values["max"] < 1e-4
    broken = Subject(config, set_up(config))
    broken.learner.temperature *= 1.02
    assert failed(broken) == {"engine = learner in float32"}

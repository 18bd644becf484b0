from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spiral_fast.commands import app
from spiral_fast.config import ConfigError
from spiral_fast.plan.gpus import GPUS, Gpu
from spiral_fast.plan.lengths import parse_lengths
from spiral_fast.plan.memory import Micro, largest_tree, peak
from spiral_fast.plan.plan import Machines, Plan, longest_sequence, make_plan
from spiral_fast.plan.simulated import Workload
from tests.plan.test_simulated import CONFIGS, config_of
from tests.plan.test_work import SHAPE

QWEN3_4B = Path(__file__).parent / "qwen3_4b"


@functools.cache
def plan_of(*overrides: str, gpu: str | Gpu = "h100-80gb", gpus: int = 1, learner_gpus: int = 1, **of) -> Plan:
    workload = Workload(parse_lengths("fixed:100"), of.get("prompt_tokens", 64), of.get("solve_rate"))
    card = GPUS[gpu] if isinstance(gpu, str) else gpu
    return make_plan(config_of(*overrides), SHAPE, workload, Machines(card, "gpu", gpus, learner_gpus, 0.4, 0.7), 2)


@pytest.mark.parametrize("overrides", [[], ["rollout.engine=radix", "rollout.cache_tokens=150000"]])
def test_the_papers_run_fits_on_one_h100(overrides):
    plan = plan_of(*overrides)
    assert plan.problems == []
    assert plan.learner_peak.total < plan.usable == 0.95 * 80e9
    assert plan.rollout_memory.total <= plan.usable
    assert plan.seconds == plan.rollout.seconds + plan.learn_seconds + plan.sync_seconds
    assert plan.gpu_hours == plan.seconds / 3600


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.micro_batch_tokens=400000"],
        ["learner.checkpointing=false"],
        ["learner.checkpointing=false", "learner.micro_batch_tokens=400000"],
        ["rollout.engine=radix"],
        ["rollout.sglang.memory_fraction=0.95"],
        ["rollout.search_max_new_tokens=56000", "learner.micro_batch_tokens=1000"],
    ],
)
def test_the_change_that_is_proposed_is_enough(overrides):
    plan = plan_of(*overrides)
    (problem,) = plan.problems
    changes = re.findall(r"[a-z_.]+=[\w.]+", problem)
    assert changes, problem
    assert plan_of(*overrides, *changes).problems == [], (problem, changes)


def test_offloading_is_proposed_where_checkpointing_is_not_enough():
    (problem,) = plan_of("rollout.search_max_new_tokens=56000", "learner.micro_batch_tokens=1000").problems
    assert problem.endswith("than there is: learner.offload_checkpoints=true")
    # servers apart, and a learner whose base does not fit
    small = Gpu(17e9, 1e14, 1e12, "made up")
    long = ["rollout.search_max_new_tokens=9000", "rollout.sglang.tensor_parallel=2", "learner.checkpointing=false"]
    (problem,) = plan_of(*long, "learner.micro_batch_tokens=1000", gpu=small, gpus=3).problems
    changes = re.findall(r"[a-z_.]+=[\w.]+", problem)
    assert "learner.offload_base=true" in changes and "learner.fsdp=true" in changes
    assert plan_of(*long, "learner.micro_batch_tokens=1000", *changes, gpu=small, gpus=3).problems == []


def test_what_no_setting_can_mend():
    small = Gpu(12e9, 1e14, 1e12, "made up")
    learning, kv = plan_of(gpu=small).problems
    assert "a larger GPU" in learning and "room for 0 tokens" in kv
    (problem,) = plan_of("rollout.set_size=7", "rollout.search_max_new_tokens=40000", "rollout.n_sets=8").problems[:1]
    assert "exceeds the model's context of 262,144" in problem


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("usable", [20e9, 76e9, 134e9])
def test_the_largest_tree_fits_and_one_token_more_does_not(checkpointing, usable):
    like = Micro(0, 0, checkpointing)
    tokens = largest_tree(SHAPE, usable, like)
    assert tokens > 1000
    assert peak(SHAPE, Micro(tokens, tokens, checkpointing)).total <= usable
    assert peak(SHAPE, Micro(tokens + 1, tokens + 1, checkpointing)).total > usable
    assert largest_tree(SHAPE, 9e9, like) == 0


def test_a_node_shares_the_problems_out():
    one, eight = plan_of(), plan_of(gpus=8)
    assert eight.servers == 7 and eight.rollout.problems == -(-one.rollout.problems // 7)
    assert eight.kv_tokens > one.kv_tokens  # no learner beside the server
    assert "SGLang: weights" not in eight.learner_peak.parts
    assert eight.sync_bytes == 7 * one.sync_bytes == 7 * 4 / 3 * 4 * SHAPE.adapter_numbers
    wide = plan_of("rollout.sglang.tensor_parallel=2", gpus=8)
    assert wide.servers == 3 and wide.server_gpus == 2


def test_the_base_on_several_learner_gpus_is_sharded():
    one, two, plain = (
        plan_of("learner.fsdp=true", gpus=4),
        plan_of("learner.fsdp=true", gpus=4, learner_gpus=2),
        plan_of(gpus=4, learner_gpus=2),
    )
    layer = SHAPE.layer_numbers * 2
    rest = SHAPE.base_bytes - SHAPE.layers * layer
    assert one.learner_peak.parts["base weights"] == SHAPE.base_bytes + layer + rest
    assert two.learner_peak.parts["base weights"] == SHAPE.base_bytes / 2 + 2 * layer + rest
    assert plain.learner_peak.parts["base weights"] == SHAPE.base_bytes
    for part in ("adapter", "optimiser moments", "gradient"):  # whole on each
        assert two.learner_peak.parts[part] == one.learner_peak.parts[part]
    assert two.learn_seconds == one.learn_seconds / 2
    assert any("no time for communication" in line for line in two.assumptions)


def test_ranks_with_an_engine_each():
    radix = ["rollout.engine=radix", "rollout.cache_tokens=50000"]
    one, two = plan_of(*radix), plan_of(*radix, "learner.fsdp=true", gpus=2)
    assert (one.servers, two.servers) == (1, 2) and two.rollout.problems == -(-one.rollout.problems // 2)
    assert two.learn_seconds == one.learn_seconds / 2
    # gathered for the rollout beside the shards
    assert one.rollout_memory.parts["base weights"] == SHAPE.base_bytes
    assert two.rollout_memory.parts["base weights"] == 1.5 * SHAPE.base_bytes
    assert plan_of(*radix, gpus=2).rollout_memory.parts["base weights"] == SHAPE.base_bytes


def test_what_is_offloaded_lies_on_the_host_and_takes_time():
    checkpoints = 36 * 2 * 2560
    plain = plan_of()
    offloaded = plan_of("learner.offload_checkpoints=true")
    tokens = plain.micro.tokens
    assert plain.host_memory == {"base weights": 0, "checkpoints (layer inputs)": 0}
    assert offloaded.host_memory["checkpoints (layer inputs)"] == checkpoints * tokens
    assert plain.learner_peak.total - offloaded.learner_peak.total == pytest.approx(checkpoints * tokens)
    seconds = 2 * checkpoints * plain.work["pruned"].tokens / 25e9
    assert offloaded.learn_seconds - plain.learn_seconds == pytest.approx(seconds)
    assert offloaded.largest_tree > plain.largest_tree

    base = plan_of("learner.fsdp=true", "learner.offload_base=true")
    assert base.host_memory["base weights"] == SHAPE.base_bytes
    layer = SHAPE.layer_numbers * 2
    assert base.learner_peak.parts["base weights"] == 2 * layer + SHAPE.base_bytes - 36 * layer
    seconds = 2 * SHAPE.base_bytes * plain.work["pruned"].micro_batches / 25e9
    assert base.learn_seconds - plain.learn_seconds == pytest.approx(seconds)
    assert base.rollout_memory.parts["base weights"] == 0  # SGLang has its own
    radix = plan_of("learner.fsdp=true", "learner.offload_base=true", "rollout.engine=radix")
    assert radix.rollout_memory.parts["base weights"] == SHAPE.base_bytes  # comes to the device
    assert any("bus at 25 GB/s" in line for line in base.assumptions)


def test_rounds_that_draw_too_much_or_too_little_are_named():
    assert "batch.round_problems" in " ".join(plan_of("batch.round_problems=256").notes)
    assert "batch.round_problems" not in " ".join(plan_of("batch.round_problems=16", "batch.max_rounds=99").notes)
    assert "batch.max_rounds" in " ".join(plan_of("batch.round_problems=16", "batch.max_rounds=2").notes)


def test_the_longest_sequence_is_a_bound():
    config = config_of()
    assert longest_sequence(config) == 1024 + 4 * 4096 + 256 + 4096
    grpo = ["credit.algorithm=grpo", "rollout.n_sets=0", "rollout.set_size=0", "rollout.n_aggregations=0"]
    assert longest_sequence(config_of(*grpo, "credit.aggregation_target_length=null")) == 1024 + 4096


@pytest.mark.parametrize(
    ("overrides", "of", "words"),
    [
        (["rollout.engine=radix"], {"gpus": 4, "learner_gpus": 2}, "--learner-gpus: 2 of 4"),
        ([], {"gpus": 2, "learner_gpus": 2}, "--learner-gpus: 2 of 2"),
        (["rollout.sglang.tensor_parallel=4"], {"gpus": 4}, "rollout.sglang.tensor_parallel: 4"),
        (["model.dtype=float32"], {}, "model.dtype: 'float32'"),
        ([], {"prompt_tokens": 2000}, "--prompt-tokens: 2000 is above rollout.max_prompt_tokens"),
        ([], {"solve_rate": 1.0}, "--solve-rate: none of"),
    ],
)
def test_what_cannot_be_planned_is_one_line(overrides, of, words):
    with pytest.raises(ConfigError) as error:
        plan_of(*overrides, **of)
    assert words in str(error.value) and "\n" not in str(error.value)


def command(*arguments: str, config: str = "paper_qwen3_4b"):
    return CliRunner().invoke(app, ["plan", str(CONFIGS / f"{config}.yaml"), *arguments])


SHORT = ["--lengths", "fixed:50", "--prompt-tokens", "64", "--problems", "2", "--model", str(QWEN3_4B)]


def test_command_prints_and_writes_the_same_figures(tmp_path):
    file = tmp_path / "new" / "plan.json"
    run = command(*SHORT, "--gpu", "h200-141gb", "--gpus", "8", "--json", str(file))
    assert run.exit_code == 0, run.output
    found = json.loads(file.read_text())
    assert found["fits"] and found["servers"] == 7 and found["learner_peak"] == "MLP backward"
    assert f"{found['largest_tree']:,}" in run.output and f"{found['seconds']:,.0f}" in run.output
    peak_moment = next(m for m in found["learner_moments"] if m["name"] == found["learner_peak"])
    assert f"{sum(peak_moment['parts'].values()) / 1e9:.2f} (peak)" in run.output
    assert "it fits" in run.output and "assumed, not measured" in run.output


def test_command_needs_no_more_than_a_config_and_a_gpu():
    run = command("model.path=builtin:parts", "model.dtype=bfloat16", "--gpu", "l4-24gb", config="demo")
    assert run.exit_code == 0, run.output
    assert "uniform from an eighth of L_max" in run.output and "search prompts of 32 tokens" in run.output


def test_command_says_what_to_change_and_fails():
    run = command("learner.checkpointing=false", *SHORT)
    assert run.exit_code == 1
    assert "does not fit: learning needs" in run.output and "learner.checkpointing=true" in run.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h1000"], "--gpu: 'h1000' is not known; there are: l4-24gb,"),
        (["--mfu", "40"], "--mfu: 40.0 must be"),
        (["--solve-rate", "often"], "--solve-rate: 'often'"),
        (["--lengths", "long"], "--lengths: 'long'"),
        (["--model", "nowhere.json"], "--model: 'nowhere.json' is neither"),
    ],
)
def test_command_refuses_in_one_line(arguments, words):
    run = command(*SHORT, *arguments)
    assert run.exit_code == 2 and words in run.output and len(run.output.splitlines()) == 1


def test_a_hub_id_without_network_asks_for_its_config(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = command("model.path=nobody/has-this-model")
    assert run.exit_code == 2 and "--model FILE" in run.output and len(run.output.splitlines()) == 1


def test_layers_of_other_parts_are_refused_by_name(tmp_path):
    config = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"intermediate_size": 128, "vocab_size": 512, "architectures": ["GPTNeoXForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = command(*SHORT, "--model", str(tmp_path))
    assert run.exit_code == 2 and len(run.output.splitlines()) == 1
    assert "GPTNeoXLayer has no self_attn.q_proj" in run.output

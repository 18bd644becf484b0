from __future__ import annotations

import base64
import json
import pickle
import pickletools

import pytest
import torch
from safetensors.torch import load_file

from spiral_fast.learner.policy_source import Adapter
from spiral_fast.rollout.sglang.adapter import FUSED, as_request, for_sglang, fused_names, write

RANK, IN = 3, 8
OUT = {"q_proj": 16, "k_proj": 4, "v_proj": 4, "o_proj": 8, "gate_proj": 12, "up_proj": 12, "down_proj": 8}


def make(modules: list[str], layers=(0, 1)) -> Adapter:
    linears = {f"base.layers.{layer}.{name}": (n, IN) for layer in (0, 1) for name, n in OUT.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"base.layers.{layer}.{name}.lora_{matrix}.weight": torch.randn(shape, generator=generator)
        for layer in layers
        for name in modules
        for matrix, shape in (("A", (RANK, IN)), ("B", (OUT[name], RANK)))
    }
    return Adapter(tensors, {"r": RANK, "lora_alpha": 2.0, "target_modules": modules}, linears)


@pytest.mark.parametrize("modules", [["q_proj"], ["k_proj"], ["v_proj", "up_proj"], ["o_proj"], [*OUT]])
@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_groups_are_whole_and_the_function_is_the_same(modules, layers):
    adapter = make(modules, layers)
    sent = for_sglang(adapter)
    for name, tensor in adapter.tensors.items():
        assert sent.tensors[name] is tensor
    for name in sent.tensors.keys() - adapter.tensors.keys():
        assert not sent.tensors[name].any()
    for layer in (0, 1):
        there = {name for name in OUT if f"base.layers.{layer}.{name}.lora_A.weight" in sent.tensors}
        assert there == (set(fused_names(modules)) if layer in layers else set())
        for name in there:
            assert sent.tensors[f"base.layers.{layer}.{name}.lora_A.weight"].shape == (RANK, IN)
            assert sent.tensors[f"base.layers.{layer}.{name}.lora_B.weight"].shape == (OUT[name], RANK)
        for group in FUSED:
            assert there.issuperset(group) or there.isdisjoint(group)
    assert sent.config == adapter.config | {"target_modules": fused_names(modules)}
    assert adapter.config["target_modules"] == modules


def test_the_pickle_holds_bytes_and_no_handle_of_this_machine():
    adapter = make([*OUT])
    body = as_request("v1", adapter)
    json.dumps(body)
    assert body["lora_name"] == "v1" and body["config_dict"] == adapter.config
    (payload,) = (base64.b64decode(part) for part in body["serialized_named_tensors"])
    strings: list[str] = []
    used = set()
    for operation, argument, _ in pickletools.genops(payload):
        if operation.name == "STACK_GLOBAL":
            used.add(tuple(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    assert used == {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
    }
    back = pickle.loads(payload)
    assert back.keys() == adapter.tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in adapter.tensors.items())


def test_a_folder_as_peft_writes_it(tmp_path):
    adapter = make(["o_proj"])
    write(adapter, tmp_path / "v1")
    assert {file.name for file in (tmp_path / "v1").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    back = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert back.keys() == adapter.tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in adapter.tensors.items())
    assert json.loads((tmp_path / "v1" / "adapter_config.json").read_text()) == adapter.config

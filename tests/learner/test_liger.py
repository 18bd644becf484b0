"""Liger's kernels on the CPU: which modules get them, which models may, and their values in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import Gemma2Config
from transformers.models.qwen3 import modeling_qwen3

from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.liger import liger_line, replace, use_liger, why_not
from spiral_fast.learner.model import load_model
from spiral_fast.learner.probe import check_packed
from spiral_fast.supported import UnsupportedModel
from tests.interpreter import needs_interpreter
from tests.learner.liger_cases import random_loaded, with_and_without

CUDA = torch.device("cuda")
needs_liger = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("liger_kernel", "triton")), reason="liger-kernel is not installed"
)
NORMS = {"norm", "input_layernorm", "post_attention_layernorm"}
PARTS = NORMS | {"self_attn", "mlp"}


def own_forwards(model) -> dict[str, int]:
    """How many modules of this name have a forward of their own, adapted linear layers left out."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if "forward" in vars(module) and not isinstance(module, LoraLayer):
            leaf = name.rpartition(".")[2]
            found[leaf] = found.get(leaf, 0) + 1
    return found


@needs_liger
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_norms_mlps_and_attentions_of_this_model_alone(family):
    before = dict(vars(modeling_qwen3))
    fused, plain = (one.causal_lm for one in with_and_without(family, torch.float32, "cpu"))
    parts = PARTS | ({"q_norm", "k_norm"} if family == "qwen3" else set())
    assert own_forwards(fused) == {part: 1 if part == "norm" else 2 for part in parts}
    assert own_forwards(plain) == {} and dict(vars(modeling_qwen3)) == before
    adapted = [module for module in fused.modules() if isinstance(module, LoraLayer)]
    assert len(adapted) == 2 * 7
    for module in adapted:  # the fused linear layers of learner/lora.py
        assert module.forward.func.__module__ == "spiral_fast.learner.lora"
    assert [type(m) for m in fused.modules()] == [type(m) for m in plain.modules()]


@needs_liger
@needs_interpreter
@pytest.mark.timeout(300)
def test_values_and_gradients_in_the_interpreter():
    """The interpreter is chosen when a process starts."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("interpreted_liger.py")),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout


def test_who_may_have_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert why_not("Qwen3ForCausalLM", "silu", CUDA) is None
    assert "on CUDA only, the model is on cpu" in why_not("Qwen3ForCausalLM", "silu", torch.device("cpu"))
    assert "is a GraniteForCausalLM, not one of Llama, Mistral" in why_not("GraniteForCausalLM", "silu", CUDA)
    assert "activation is gelu" in why_not("LlamaForCausalLM", "gelu", CUDA)
    assert liger_line(ModelConfig(path="builtin:parts"), "cuda") == "Liger: used"
    assert liger_line(ModelConfig(path="nobody/nothing"), "cuda").startswith("Liger: used if the model is one of Llama")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "liger-kernel is not installed" in why_not("Qwen3ForCausalLM", "silu", CUDA)


def test_the_switch_on_a_cpu():
    """auto and false leave the model alone, true is refused in one line."""
    model = random_loaded("qwen3", torch.float32, "cpu").causal_lm
    assert not use_liger(model, "auto", "cpu") and not use_liger(model, False, "cpu") and own_forwards(model) == {}
    with pytest.raises(ConfigError, match="^model.liger: true cannot be used: .*CUDA only.*; set it to auto$"):
        load_model(ModelConfig(path="builtin:parts", liger=True), "cpu")
    with pytest.raises(ConfigError, match="^model.liger: true cannot be used: .*CUDA only"):  # as doctor says it
        liger_line(ModelConfig(path="builtin:parts", liger=True), "cpu")


def test_a_config_without_an_activation_of_llamas_name(tmp_path, monkeypatch):
    Gemma2Config(architectures=["Gemma2ForCausalLM"]).save_pretrained(tmp_path)  # its name: hidden_activation
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert "is a Gemma2ForCausalLM" in liger_line(ModelConfig(path=str(tmp_path)), "cuda")


@needs_liger
def test_the_probe_sees_what_is_put_in_place(monkeypatch):
    """A kernel that is a little off, as one would be whose convention is another."""
    import liger_kernel.transformers.functional as kernels

    monkeypatch.setattr(kernels, "liger_rope", modeling_qwen3.apply_rotary_pos_emb)
    monkeypatch.setattr(kernels, "liger_swiglu", lambda gate, up: torch.nn.functional.silu(gate) * up)
    monkeypatch.setattr(
        kernels, "liger_rms_norm", lambda x, w, eps, *_: torch.nn.functional.rms_norm(x, w.shape, w, eps)
    )
    right, wrong = (random_loaded("qwen3", torch.float32, "cpu") for _ in range(2))
    check_packed(right.model, lambda: replace(right.causal_lm))
    monkeypatch.setattr(kernels, "liger_swiglu", lambda gate, up: torch.nn.functional.gelu(gate) * up)
    with pytest.raises(UnsupportedModel, match="its packed forward is off by"):
        check_packed(wrong.model, lambda: replace(wrong.causal_lm))

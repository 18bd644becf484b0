"""Weights read into shards: those that transformers loads, to the bit, and the same words about broken files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from spiral_fast.config import ConfigError, ModelConfig
from spiral_fast.learner.model import load_model
from spiral_fast.learner.streamed import Streamed
from tests.learner.tiny import CONTEXT, FAMILIES, VOCABULARY, WINDOWED, save_tokenizer


@pytest.fixture(autouse=True)
def one_rank():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def save(folder: Path, family: str = "qwen3", *, tied: bool = True, only_decoder: bool = False) -> Path:
    """A tiny model in several files, with two ends of sequence of its own."""
    torch.manual_seed(1)
    config_class, model_class, *changes = (FAMILIES | WINDOWED)[family]
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    model = model_class(config_class(**settings | (changes[0] if changes else {})))
    model.generation_config = GenerationConfig(eos_token_id=[3, 4])
    (model.model if only_decoder else model).save_pretrained(folder, max_shard_size="20KB")
    if only_decoder:
        model.config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def both(folder: Path, **changes):
    """As transformers loads it, and as it is read into shards, from the same random state; and that of afterwards."""
    config = ModelConfig.model_validate({"path": str(folder), "lora": {"rank": 4}} | changes)
    found = []
    for shard in (False, True):
        torch.manual_seed(5)
        found += [load_model(config, "cpu", shard=shard), torch.rand(2)]
    assert torch.equal(found[1], found[3])
    return found[0], found[2]


def assert_equal(whole, sharded) -> None:
    assert sharded.eos_token_ids == whole.eos_token_ids and sharded.max_context == whole.max_context
    assert sharded.causal_lm.config.to_dict() == whole.causal_lm.config.to_dict()
    assert not sharded.model.training
    for kind in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(each.model, kind)(remove_duplicate=False)) for each in (whole, sharded))
        assert one.keys() == other.keys() and one
        for name, tensor in one.items():
            assert isinstance(other[name], DTensor) == (kind == "named_parameters" and "lora_" not in name), name
            read = other[name].to_local() if isinstance(other[name], DTensor) else other[name]
            assert read.dtype == tensor.dtype and other[name].requires_grad == tensor.requires_grad
            assert torch.equal(read, tensor), name
    head, embedding = (part.weight for part in (sharded.causal_lm.lm_head, sharded.causal_lm.get_input_embeddings()))
    assert (head is embedding) == whole.causal_lm.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("qwen3", True, "bfloat16"),
        ("qwen3", False, "float32"),
        ("llama", False, "bfloat16"),
        ("qwen2", True, "float32"),
        ("mistral", True, "bfloat16"),
        ("gemma3", True, "float32"),  # two rotary tables and a scaled embedding: buffers of its own
    ],
)
def test_it_is_what_transformers_loads(tmp_path, family, tied, dtype):
    folder = save(tmp_path, family, tied=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # none says that the whole model was read
        assert_equal(*both(folder, dtype=dtype))


def test_two_adapters_and_a_loaded_one(tmp_path):
    folder = save(tmp_path / "model")
    whole, sharded = both(folder, policy="two_adapters")
    assert_equal(whole, sharded)
    with torch.no_grad():
        for name, parameter in whole.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    whole.model.save_pretrained(tmp_path / "adapters")
    loaded = both(folder, policy="two_adapters", adapter=str(tmp_path / "adapters"))
    assert_equal(*loaded)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.search.weight"
    assert torch.equal(loaded[1].model.get_parameter(name), whole.model.get_parameter(name))


def tied_head_stored_too(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["model.embed_tokens.weight"]
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = file.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("only_decoder", [True, False])
def test_what_needs_transformers_is_left_to_it(tmp_path, only_decoder):
    """Names without the prefix of the whole model; a tied head that is stored beside its embedding."""
    folder = save(tmp_path, only_decoder=only_decoder)
    if not only_decoder:
        tied_head_stored_too(folder)
    with pytest.warns(UserWarning, match="every rank reads the whole model"):
        assert_equal(*both(folder))


def test_one_file_comes_before_an_index(tmp_path):
    """A folder with both, as transformers reads it."""
    folder = save(tmp_path)
    weights = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    save_file({name: 2 * t for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert_equal(*both(folder))


@pytest.mark.filterwarnings("ignore:.*every rank reads")
def test_a_file_that_the_config_names(tmp_path):
    folder = save(tmp_path)
    weights = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    save_file({name: 2 * t for name, t in weights.items()}, folder / "mine.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "mine.safetensors"}))
    assert_equal(*both(folder))


def without(name):
    return lambda weights: weights.pop(name)


def of_shape(name, *shape):
    return lambda weights: weights.update({name: torch.zeros(shape)})


@pytest.mark.filterwarnings("ignore:.*every rank reads")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), "lacks the weight 'model.layers.1.mlp.up_proj.weight'"),
        (of_shape("model.layers.1.mlp.up_proj.weight", 3, 3), "of shape (3, 3)"),
        (of_shape("model.layers.9.mlp.up_proj.weight", 48, 32), "its config has no place for"),
        (None, "SafetensorError"),
        (lambda weights: weights["model.norm.weight"].fill_(torch.nan), "not finite"),
    ],
)
def test_broken_files_are_refused_in_the_same_words(tmp_path, change, words):
    folder = save(tmp_path)
    weights = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    for file in folder.glob("model*"):
        file.unlink()
    if change:
        change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if change is None:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    said = []
    for shard in (False, True):
        with pytest.raises(ConfigError) as error:
            load_model(ModelConfig(path=str(folder), dtype="float32"), "cpu", shard=shard)
        said.append(str(error.value))
    assert said[0] == said[1] and words in said[0]


def test_placeholders_take_no_memory(tmp_path):
    folder = save(tmp_path)
    seen = {}

    def put_on(model):
        seen.update({name: (p.untyped_storage().nbytes(), p.device.type) for name, p in model.named_parameters()})
        return model

    from transformers import AutoConfig

    model = Streamed(str(folder), AutoConfig.from_pretrained(folder), torch.float32).with_adapter(put_on)
    assert set(seen.values()) == {(4, "cpu")}
    assert all(parameter.is_meta for parameter in model.parameters())


RANK = """
import json, sys, threading, time
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from spiral_fast import ranks
from spiral_fast.config import ModelConfig
from spiral_fast.learner import fsdp
from spiral_fast.learner.model import load_model
from spiral_fast.learner.packed import pack

def resident():  # anonymous memory alone: pages of files are the system's cache
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

ranks.join("cpu")
load_model(ModelConfig(path="builtin:parts", dtype="bfloat16"), "cpu", shard=True)
before = most = resident()
done = False
def watch():
    global most
    while not done:
        most = max(most, resident())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
loaded = load_model(ModelConfig(path=sys.argv[1], dtype="bfloat16", lora={"rank": 1}), "cpu", shard=True)
done = True
watcher.join()
held = sum(p.to_local().nbytes for p in loaded.model.parameters() if isinstance(p, DTensor))
made = [most - before, resident() - before, held, sum(p.nbytes for p in loaded.model.parameters())]
name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # which FSDP calls
gathers, gather = 0, getattr(dist, name)
def counted(*args, **kwargs):
    global gathers
    gathers += 1
    return gather(*args, **kwargs)
setattr(dist, name, counted)
with fsdp.unsharded(loaded.policy), torch.no_grad():
    made.append(gathers)
    for _ in range(3):
        loaded.policy(pack([([0], [0])], torch.device("cpu")), 1.0)
made.append(gathers)
if ranks.rank() == 0:
    print(json.dumps(made))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(200)
def test_two_ranks_hold_half_each_and_never_the_whole(tmp_path):
    """Peak of the loading, its probe included, beside the bytes of the base: 126 MB in 20 layers."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=20,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        eos_token_id=5,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    # glibc else keeps what was freed, in amounts that vary
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0 and "every rank reads the whole" not in done.stderr, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    peak, after, held, whole, *gathers = json.loads(line)
    assert held == pytest.approx(whole / 2, rel=0.02)
    assert after < 0.75 * whole
    assert peak < 0.9 * whole
    assert gathers == [20 + 1, 20 + 1]  # each layer and the rest once, however much is sampled

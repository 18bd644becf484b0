"""The cache of dequantised weights; loading real ones is in test_model.py."""

from __future__ import annotations

import hashlib
import os
import stat
from types import SimpleNamespace

import pytest
from gguf import GGUFWriter

from spiral_fast.learner import gguf


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A GGUF file of two special tokens whose loaders are stand-ins that write one file each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []
    tokenizer = SimpleNamespace(eos_token="a", unk_token="b", convert_ids_to_tokens="abcdef".__getitem__)

    def loader(name: str):
        def write(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)

        loaded = tokenizer if name == "tokenizer" else SimpleNamespace()
        loaded.save_pretrained = write
        return SimpleNamespace(from_pretrained=lambda *_, **__: calls.append(name) or loaded)

    monkeypatch.setattr(gguf, "AutoTokenizer", loader("tokenizer"))
    monkeypatch.setattr(gguf, "AutoModelForCausalLM", loader("model"))
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_bos_token_id(4)
    writer.add_eos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return SimpleNamespace(path=path, calls=calls, tokenizer=tokenizer, cache=tmp_path / "cache" / "spiral-fast")


def test_written_once_and_nothing_is_left_beside_it(file):
    folder = gguf.dequantised(file.path)
    assert gguf.dequantised(file.path) == folder and file.calls == ["tokenizer", "model"]
    assert list(file.cache.iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["model", "tokenizer"]
    (file.cache / "plain").mkdir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((file.cache / "plain").stat().st_mode)


def test_what_a_killed_process_of_the_same_id_left_is_no_obstacle(file):
    name = f"tiny-{hashlib.sha256(file.path.read_bytes()).hexdigest()[:16]}"
    left = file.cache / f".{name}-{os.getpid()}"
    left.mkdir(parents=True)
    assert gguf.dequantised(file.path) == file.cache / name
    assert (file.cache / name / "model").is_file()


def test_special_tokens_are_those_the_file_names(file):
    gguf.dequantised(file.path)
    tokenizer = file.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("e", "d", "b")

"""The cache of dequantised weights; loading real ones is in test_model.py."""

from __future__ import annotations

import hashlib
import os
import stat
from types import SimpleNamespace

import pytest

from spiral_fast.learner import gguf


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A GGUF file whose loaders are stand-ins that write one file each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []

    def loader(name: str):
        def write(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)

        return SimpleNamespace(
            from_pretrained=lambda *_, **__: calls.append(name) or SimpleNamespace(save_pretrained=write)
        )

    monkeypatch.setattr(gguf, "AutoTokenizer", loader("tokenizer"))
    monkeypatch.setattr(gguf, "AutoModelForCausalLM", loader("model"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return SimpleNamespace(path=path, calls=calls, cache=tmp_path / "cache" / "spiral-fast")


def test_written_once_and_nothing_is_left_beside_it(file):
    folder = gguf.dequantised(file.path)
    assert gguf.dequantised(file.path) == folder and file.calls == ["tokenizer", "model"]
    assert list(file.cache.iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["model", "tokenizer"]
    (file.cache / "plain").mkdir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((file.cache / "plain").stat().st_mode)


def test_what_a_killed_process_of_the_same_id_left_is_no_obstacle(file):
    name = f"tiny-{hashlib.sha256(b'GGUF').hexdigest()[:16]}"
    left = file.cache / f".{name}-{os.getpid()}"
    left.mkdir(parents=True)
    assert gguf.dequantised(file.path) == file.cache / name
    assert (file.cache / name / "model").is_file()

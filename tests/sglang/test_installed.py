from __future__ import annotations

import pytest

from spiral_fast.rollout.chosen import sglang_installed


@pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed here; `make test-sglang` runs these tests")
def test_sglang_is_the_one_pinned():
    from importlib.metadata import version

    from packaging.requirements import Requirement

    (pinned,) = [r for r in map(Requirement, _extra("sglang")) if r.name == "sglang"]
    assert version("sglang") in pinned.specifier


def _extra(name: str) -> list[str]:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"][name]

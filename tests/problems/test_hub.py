from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spiral_fast.config import ConfigError, HubConfig
from spiral_fast.problems.hub import hub_rows
from spiral_fast.problems.rows import Fields, problems_of

ROWS = [{"problem": f"p{i}", "answer": f"so\n#### {i}", "meta": {"difficulty": f"{i % 8}/8"}} for i in range(1100)]
FIELDS = Fields(question="problem", answer_pattern="#### (.+)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(params=["parquet folder", "configs in a card", "save_to_disk"])
def saved(request, tmp_path, own_cache):
    """A data set as `datasets` finds it: (folder, config, split)."""
    folder = tmp_path / "polaris"
    train, test = own_cache.Dataset.from_list(ROWS), own_cache.Dataset.from_list(ROWS[:5])
    if request.param == "save_to_disk":
        own_cache.DatasetDict(train=train, test=test).save_to_disk(str(folder))
        return folder, None
    (folder / "main").mkdir(parents=True)
    train.to_parquet(str(folder / "main" / "train-00000-of-00001.parquet"))
    test.to_parquet(str(folder / "main" / "test-00000-of-00001.parquet"))
    if request.param == "parquet folder":
        return folder, None
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "  - split: test\n    path: main/test-*\n- config_name: other\n  data_files: main/test-*\n---\n"
    )
    return folder, "main"


def test_rows_of_each_split_in_order(saved):
    folder, config = saved
    problems = problems_of(hub_rows(HubConfig(dataset=str(folder), config=config), "problems.hub"), FIELDS)
    assert [(p.id, p.question, p.answer, p.data) for p in problems] == [
        (f"{folder}:train:{i}", f"p{i}", str(i), {"meta": {"difficulty": f"{i % 8}/8"}}) for i in range(1100)
    ]
    test = HubConfig(dataset=str(folder), config=config, split="test")
    assert len(problems_of(hub_rows(test, "problems.eval_hub"), FIELDS)) == 5


def test_a_bad_row_and_an_unknown_split_are_one_line(saved):
    folder, config = saved
    with pytest.raises(ConfigError) as error:
        problems_of(
            hub_rows(HubConfig(dataset=str(folder), config=config), "problems.hub"), Fields(question="question")
        )
    place = f"{folder} ({'main, ' if config else ''}train): row 0: the field 'question' is missing; found 'problem'"
    assert str(error.value).startswith(place)
    with pytest.raises(ConfigError) as error:
        list(hub_rows(HubConfig(dataset=str(folder), config=config, split="dev"), "problems.hub"))
    said = str(error.value)
    assert said.startswith(f"problems.hub.dataset: {str(folder)!r} (config {config!r}, split 'dev') cannot be loaded: ")
    assert "Unknown split" in said and "train" in said and "\n" not in said


def test_an_unknown_configuration_names_those_there_are(saved):
    folder, config = saved
    if config is None:
        pytest.skip("has no configurations")
    with pytest.raises(ConfigError, match=r"config 'socratic'.* cannot be loaded: .*'main', 'other'"):
        list(hub_rows(HubConfig(dataset=str(folder), config="socratic"), "problems.hub"))


def test_code_of_a_data_set_is_not_run(tmp_path):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        list(hub_rows(HubConfig(dataset=str(folder)), "problems.hub"))
    assert not (tmp_path / "ran").exists()


def test_offline_it_says_what_it_needs(tmp_path):
    """In a process of its own: the library reads HF_HUB_OFFLINE when it is imported."""
    code = (
        "from spiral_fast.config import HubConfig\nfrom spiral_fast.problems.hub import hub_rows\n"
        "try: list(hub_rows(HubConfig(dataset='openai/gsm8k', config='main', split='test'), 'problems.eval_hub'))\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert said.count("\n") == 1
    assert said.startswith("problems.eval_hub.dataset: 'openai/gsm8k' is not in the cache and the hub cannot be asked ")
    assert "HF_HUB_OFFLINE is set" in said and str(tmp_path) in said
    assert "load_dataset('openai/gsm8k', 'main', split='test')" in said


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"problems.hub.dataset: 'openai/gsm8k' needs the package datasets; run: pip .*hub"
    ):
        list(hub_rows(HubConfig(dataset="openai/gsm8k"), "problems.hub"))

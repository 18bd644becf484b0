"""Rows of a data set of the Hugging Face hub, read by the library `datasets`, which runs no code of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spiral_fast.config import ConfigError, HubConfig
from spiral_fast.install import install_command
from spiral_fast.problems.rows import Row


def hub_rows(settings: HubConfig, key: str) -> Iterator[Row]:
    """The rows of one split, counted from 0 as the hub's viewer does.

    `key`: the config section, for errors. Raises ConfigError, offline naming what has to be fetched and how.
    """
    name = settings.dataset
    place = f"{name} ({', '.join(filter(None, [settings.config, settings.split]))})"
    number = 0
    for batch in _read(settings, key).with_format("arrow").iter(batch_size=1024):  # arrow: no image is decoded
        for values in batch.to_pylist():
            yield Row(f"{place}: row {number}", f"{name}:{settings.split}:{number}", values)
            number += 1
    if not number:
        raise ConfigError(f"{key}.dataset: {place} holds no row")


def _read(settings: HubConfig, key: str):
    try:
        import datasets
    except ModuleNotFoundError:
        why = f"needs the package datasets; run: {install_command('hub')}"
        raise ConfigError(f"{key}.dataset: {settings.dataset!r} {why}") from None
    name, split = settings.dataset, settings.split
    try:
        if _saved_to_disk(Path(name)):
            return _split_of(datasets.load_from_disk(name), split)
        return datasets.load_dataset(name, settings.config, split=split, revision=settings.revision)
    except ConnectionError as error:
        raise ConfigError(f"{key}.dataset: {_unreachable(settings, error)}") from None
    except Exception as error:  # of any class: unknown names, splits and configurations, broken files, no access
        said = " ".join(str(error).split())
        said = said if len(said) <= 300 else said[:300] + " ..."
        described = f"config {settings.config!r}, split {split!r}"
        raise ConfigError(f"{key}.dataset: {name!r} ({described}) cannot be loaded: {said}") from None


def _unreachable(settings: HubConfig, error: Exception) -> str:
    """What to do where the hub cannot be asked and the data set is not in its cache."""
    named = [settings.dataset, *([settings.config] if settings.config else [])]
    arguments = ", ".join([*map(repr, named), f"split={settings.split!r}"])
    if settings.revision:
        arguments += f", revision={settings.revision!r}"
    call = f'python -c "from datasets import load_dataset; load_dataset({arguments})"'
    import datasets

    if datasets.config.HF_HUB_OFFLINE:
        why, then = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or "
    else:
        why, then = " ".join(str(error).split())[:200], ""
    return (
        f"{settings.dataset!r} is not in the cache and the hub cannot be asked ({why}); {then}where there is a network "
        f"run {call} and bring its cache ({datasets.config.HF_DATASETS_CACHE}) here, or name a folder with its files"
    )


def _saved_to_disk(folder: Path) -> bool:
    """Whether `datasets` wrote it by save_to_disk."""
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _split_of(found, split: str):
    """A folder of save_to_disk holds one split or all of them by name."""
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise ValueError(f"Unknown split {split!r}; it has {', '.join(map(repr, found))}")
    return found[split]

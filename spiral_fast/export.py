"""`spiral-fast export`: a trained policy as a folder for plain peft or plain transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from spiral_fast.config import ConfigError, ModelConfig, load_config
from spiral_fast.learner.roles import ADAPTERS, WEIGHTS, adapter_folders
from spiral_fast.record.checkpoints import DIGESTS, flaw_of
from spiral_fast.record.files import by_step, writing

ROLES = ADAPTERS["two_adapters"]


def export(
    source: Path, out: Path, *, merged: bool = False, config: Path | None = None, role: str | None = None
) -> str:
    """Write `out`, whole or not at all, from a run (its newest whole checkpoint) or one checkpoint; returns one line.

    An adapter folder for peft.AutoPeftModelForCausalLM, the base model beside it in `base` where it is no folder or hub
    id that others can load; or, `merged`, a model folder for transformers.AutoModelForCausalLM. Of two adapters `role`
    names one; without it both are written, each into a folder of its name. `config` is needed only for an adapter that
    does not lie in its run. Raises ConfigError.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: exists already; nothing is overwritten, name another folder")
    checkpoint = _checkpoint(source)
    adapters = _adapters(checkpoint, role)
    model = _model_config(checkpoint, config)
    if merged and len(adapters) > 1:
        raise ConfigError(
            f"--merged: {checkpoint} holds two adapters, of which one model can hold one: name it, --role"
        )
    try:
        line, write = (_merged if merged else _adapter)(adapters, model, out)  # all that is read is read here
    except (OSError, ConfigError):
        if checkpoint.exists():
            raise
        raise ConfigError(f"{checkpoint}: the run, which goes on, has made room for newer ones; export again") from None
    aside = out.with_name(f".{out.name}.aside")
    with writing(out):
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed here
        aside.mkdir(parents=True)
        try:
            write(aside)
            aside.rename(out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return f"{out}: {line}, from {checkpoint}"


def _checkpoint(source: Path) -> Path:
    """`source` itself, or the newest whole checkpoint of a run."""
    if any((folder / WEIGHTS).is_file() for folder in (source, *(source / role for role in ROLES))):
        if (source / DIGESTS).exists() and (found := flaw_of(source)):
            raise ConfigError(f"{source}: {found}; export another checkpoint")
        return source
    flaws = []
    for folder in reversed(by_step(source / "checkpoints").values()):
        found = flaw_of(folder)
        if found is None:
            return folder
        flaws.append(f"{folder.name}: {found}")
    if flaws:
        raise ConfigError(f"{source}: no checkpoint is whole ({'; '.join(flaws[:3])})")
    raise ConfigError(f"{source}: neither a checkpoint ({WEIGHTS}) nor a run that has one")


def _adapters(checkpoint: Path, role: str | None) -> dict[str, Path]:
    """Folders of the adapters to write, by the folder inside `out` they go to."""
    two = not (checkpoint / WEIGHTS).is_file()
    if role is None:
        return adapter_folders(checkpoint, ROLES) if two else {"": checkpoint}
    if role not in ROLES:
        raise ConfigError(f"--role: {role!r} is neither {' nor '.join(ROLES)}")
    if not two:
        raise ConfigError(f"--role: {role!r} cannot be chosen: {checkpoint} holds one adapter for both; leave it out")
    return {"": adapter_folders(checkpoint, ROLES)[role]}


def _model_config(checkpoint: Path, config: Path | None) -> ModelConfig:
    file = config or checkpoint.resolve().parent.parent / "config.yaml"
    if config is None and not file.is_file():
        raise ConfigError(f"{checkpoint}: lies in no run with a config.yaml; name its base model: --config CONFIG")
    return load_config(file).model


def _adapter(adapters: dict[str, Path], model: ModelConfig, out: Path) -> tuple[str, Callable[[Path], None]]:
    from spiral_fast.learner.model import load_tokenizer, source_of

    source = source_of(model.path)
    tokenizer = load_tokenizer(model.path)
    read = {
        name: (json.loads((folder / "adapter_config.json").read_text()), (folder / WEIGHTS).read_bytes())
        for name, folder in adapters.items()
    }
    own_base = model.path.startswith(("gguf:", "package:", "builtin:"))  # what only spiral-fast finds
    base = str((out / "base" if own_base else Path(source)).resolve()) if Path(source).is_dir() else source

    def write(folder: Path) -> None:
        if own_base:
            shutil.copytree(source, folder / "base")
        tokenizer.save_pretrained(folder)
        for name, (settings, weights) in read.items():
            own = folder / name
            own.mkdir(exist_ok=True)
            (own / WEIGHTS).write_bytes(weights)
            content = settings | {"base_model_name_or_path": base, "inference_mode": True}
            (own / "adapter_config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    return f"{'adapter' if len(read) == 1 else 'adapters ' + ' and '.join(read)} on {base}", write


def _merged(adapters: dict[str, Path], model: ModelConfig, out: Path) -> tuple[str, Callable[[Path], None]]:
    from spiral_fast.learner.merge import merge
    from spiral_fast.learner.model import load_model

    if model.quantisation != "none":
        raise ConfigError(
            f"--merged: the adapter was trained on a base in {model.quantisation} (model.quantisation), not on the "
            "weights it would be merged into; export it without --merged"
        )
    (folder,) = adapters.values()
    loaded = load_model(model.model_copy(update={"adapter": str(folder), "policy": "shared"}), "cpu")
    plain, rounding = merge(loaded.model)
    plain.generation_config.eos_token_id = sorted(loaded.eos_token_ids)  # every id that ended a completion in the run

    def write(folder: Path) -> None:
        plain.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)

    dtype = str(rounding.dtype).removeprefix("torch.")
    return f"merged model in {dtype}, whose rounding changed the update by {rounding.lost:.2g} of its norm", write

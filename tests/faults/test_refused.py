"""Servers that cannot serve the learner: the run does not begin, and says why in one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.faults.servers import Servers
from tests.faults.summary import Fault
from tests.faults.training import ROOT, Training
from tests.sglang.processes import none_left

PARTS = ROOT / "spiral_fast" / "models" / "parts"


def other_model(folder: Path, change: str) -> Path:
    """The demo's model but for one thing."""
    config = AutoConfig.from_pretrained(PARTS)
    model = AutoModelForCausalLM.from_pretrained(PARTS)
    if change == "vocabulary":
        model.resize_token_embeddings(config.vocab_size + 4)
    elif change == "hidden size":
        config.hidden_size *= 2
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    elif change == "weights":
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 0.02 * torch.randn_like(parameter)
    else:
        model.config.max_position_embeddings *= 8
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(PARTS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "overrides", "says"),
    [
        ("vocabulary", (), "whose vocabulary has 68 tokens; the learner's has 72: give both the same model.path"),
        ("hidden size", (), "its base model is not the learner's: give both one model.path"),
        ("weights", (), "its base model is not the learner's: give both one model.path"),
        (
            "context",
            ("rollout.search_max_new_tokens=1200",),
            "a prompt of 17 tokens + max_new_tokens 1200 exceeds the context of 1022 tokens",
        ),
    ],
)
def test_refused_at_the_start(
    runs: Path,
    servers: Servers,
    leaves_nothing: list,
    report: Callable[[Fault], None],
    change: str,
    overrides: tuple[str, ...],
    says: str,
):
    model = other_model(runs / f"other {change}", change)
    training = Training(
        runs / f"refused {change}",
        servers.override,
        f"model.path={str(model)!r}",
        *overrides,
        environment=servers.environment,
    )
    leaves_nothing.append(training)
    training.start()
    at = time.monotonic()
    training.wait_for("^run ", at, 300.0)
    processes, at = training.processes(), time.monotonic()
    assert training.end(300.0) == 1
    seconds = time.monotonic() - at
    error = next(text for text in training.errors())
    assert says in error
    assert training.steps() == 0
    assert none_left(processes)
    names = {"context": "a request that is too long for the server"}
    name = names.get(change, f"a server of another model ({change})")
    report(Fault(name, "refused at the start", error, seconds, None))

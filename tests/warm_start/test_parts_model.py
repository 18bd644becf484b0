from __future__ import annotations

import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spiral_fast.problems.parts import FIXED, VARIABLE
from spiral_fast.prompts.parts import VOCABULARY
from spiral_fast.warm_start.parts_examples import Example
from spiral_fast.warm_start.parts_measure import measure
from spiral_fast.warm_start.parts_model import Recipe, build_model, build_tokenizer, card, example_loss, train

SHIPPED = Path(str(files("spiral_fast") / "models" / "parts"))
SHORT = Recipe(search_steps=40, search_batch=8, aggregation_steps=20, aggregation_batch=4, warmup=5)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def losses_of(lines: list[str]) -> list[float]:
    return [float(re.search(r"loss ([\d.]+)", line).group(1)) for line in lines]


def test_same_seed_same_weights_and_the_loss_falls():
    lines: list[str] = []
    weights = [train(SHORT, progress=lines.append)[0].state_dict() for _ in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert losses_of(lines)[0] < 0.75 * math.log(len(VOCABULARY))  # nats of a uniform guess
    other = train(
        Recipe(seed=1, search_steps=1, aggregation_steps=1, search_batch=2, aggregation_batch=2), lines.append
    )
    assert not torch.equal(other[0].model.norm.weight, weights[0]["model.norm.weight"])


def test_example_loss_against_one_row_at_a_time():
    """Batched with padding = mean over all completion tokens of the rows' own log-probs."""
    torch.manual_seed(0)
    model = build_model(build_tokenizer()).double().eval()
    examples: list[Example] = [([9, 10, 11], [12, 1]), ([20], [21, 22, 23, 24, 1]), ([30, 31], [1])]
    total = 0.0
    for prompt, completion in examples:
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
        for offset, target in enumerate(completion):
            total -= torch.log_softmax(logits[len(prompt) + offset - 1], dim=-1)[target]
    torch.testing.assert_close(example_loss(model, examples), total / 8, rtol=1e-12, atol=1e-12)


def claimed() -> dict[str, dict[str, float]]:
    """The table of the shipped card."""
    table = [line.strip("| ").split(" | ") for line in (SHIPPED / "README.md").read_text().splitlines() if "|" in line]
    return {row[0]: dict(zip(table[0][1:], map(float, row[1:]), strict=True)) for row in table[2:]}


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(SHIPPED).eval(), AutoTokenizer.from_pretrained(SHIPPED)


def test_the_shipped_checkpoint_is_small_plain_and_speaks_the_task(shipped):
    model, tokenizer = shipped
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 3e6
    assert {file.suffix for file in SHIPPED.iterdir()} == {".json", ".safetensors", ".md"}
    assert model.dtype == torch.float32 and model.config.model_type == "qwen3"
    assert [tokenizer.convert_ids_to_tokens(id) for id in range(model.config.vocab_size)] == list(VOCABULARY)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("variant", [FIXED, VARIABLE])
def test_the_shipped_checkpoint_does_what_its_card_claims(shipped, variant):
    """Other problems and fewer of them: within four standard errors, which are those of 48 problems."""
    figures, claim = measure(*shipped, variable_length=variant == VARIABLE, problems=48, rsa_steps=1, seed=2), claimed()
    for name, tolerance in {"pass@1": 0.05, "pass@8": 0.25, "part": 0.09, "format": 0.02, "rsa 1": 0.16}.items():
        assert abs(figures[name] - claim[variant][name]) < tolerance, name


def test_the_card_claims_a_model_with_room_to_learn():
    for figures in claimed().values():
        assert 0.03 < figures["pass@1"] < 0.12 and 0.3 < figures["part"] < 0.5
        assert 0.2 <= figures["rsa 1"] <= 0.35 and figures["rsa 3"] > figures["rsa 1"]
    assert claimed()[VARIABLE]["search_tokens"] > claimed()[FIXED]["search_tokens"] + 2


def test_the_card_tells_the_recipe():
    text = card(Recipe(seed=5), 12.3, {"fixed": {"pass@1": 0.5}})
    assert "- seed: 5" in text and "| fixed | 0.500 |" in text and f"torch {torch.__version__}" in text
    assert "- seed: 0" in (SHIPPED / "README.md").read_text()

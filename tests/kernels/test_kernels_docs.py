"""The code of docs/kernels.md runs, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import spiral_kernels
from spiral_kernels.dispatch import operations

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def block(containing: str) -> str:
    (found,) = [code for code in BLOCKS if containing in code]
    return found


def test_grpo_step():
    """One SGD step equals that of DAPO's formula on padded logits in float64, ratios on both sides of the clip."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.2}
    config = Qwen3Config(vocab_size=61, pad_token_id=0, **sizes, **heads)
    model = Qwen3ForCausalLM(config)
    truth = Qwen3ForCausalLM(config).double()
    truth.load_state_dict(model.state_dict())
    batch, length, n_prompt = 6, 9, 3
    input_ids = torch.randint(61, (batch, length))
    lengths = torch.tensor([9, 5, 4, 9, 7, 8])  # prompt and sampled tokens
    attention_mask = (torch.arange(length) < lengths[:, None]).long()
    sampled = attention_mask.bool() & (torch.arange(length) >= n_prompt)
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])

    logits = truth(input_ids, attention_mask=attention_mask, use_cache=False).logits / 0.7
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    rollout = logp.detach() + 0.4 * torch.randn(logp.shape, dtype=logp.dtype)
    credit = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    ratio, credit, mask = (logp - rollout).exp(), credit.view(-1, 1).double(), sampled[:, 1:]
    loss = -torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)[mask].sum() / mask.sum()
    loss.backward()

    namespace = {}
    exec(block("def grpo_step"), namespace)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rollout = torch.nn.functional.pad(rollout, (1, 0)).float()
    arguments = input_ids, attention_mask, sampled, rewards, rollout
    result = namespace["grpo_step"](model, optimizer, *arguments, temperature=0.7)
    assert result.clip_high > 0 and result.clip_low > 0
    torch.testing.assert_close(result.loss, loss.float(), rtol=1e-5, atol=1e-6)
    for name, parameter in truth.named_parameters():
        step = before[name] - dict(model.named_parameters())[name]
        torch.testing.assert_close(
            step, parameter.grad.float(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_group_step():
    """One SGD step equals that of the formula, each sample alone in float64; one sample is dead."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=61, **sizes, **heads))
    truth = Qwen3ForCausalLM(model.config).double()
    truth.load_state_dict(model.state_dict())
    prompt, samples = torch.randint(61, (20,)).tolist(), [torch.randint(61, (n,)).tolist() for n in (5, 1, 9)]
    advantages, rollout = torch.tensor([0.5, -1.25, 0.0]), torch.randn(15) - 4

    losses = []
    for sample, advantage, its in zip(samples, advantages, rollout.split([5, 1, 9]), strict=True):
        logits = truth(torch.tensor([prompt + sample]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(sample)[:, None])[:, 0]
        losses.append(-((logp - its).exp() * advantage).sum() / 15)
    sum(losses).backward()

    namespace = {"torch": torch}
    exec(block("def group_step"), namespace)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = namespace["group_step"](model, optimizer, prompt, samples, advantages, rollout)
    torch.testing.assert_close(loss, sum(losses).detach().float(), rtol=1e-5, atol=1e-6)
    for name, parameter in truth.named_parameters():
        step = before[name] - dict(model.named_parameters())[name]
        torch.testing.assert_close(step, parameter.grad.float(), rtol=1e-4, atol=1e-5)


def test_forcing_a_backend():
    exec(block("force_backend"), {"torch": torch})


def test_other_blocks_are_run_elsewhere():
    """Those of TRL and verl by the tests of the integrations."""
    assert len(BLOCKS) == 5
    assert block("GRPOTrainer(") and block("integrations.verl")


def table(heading: str) -> list[list[str]]:
    rows = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_backends_are_those_there_are():
    documented = {operation: names.split(", ") for operation, names in table("operation")}
    assert documented == {name: list(spiral_kernels.available_backends(name)) for name in operations()}


@pytest.mark.parametrize("name", [row[0].strip("`") for row in table("function")])
def test_functions_exist(name):
    assert name in spiral_kernels.__all__


def test_every_function_has_its_row():
    helpers = {"available_backends", "flat_set_advantages", "force_backend", "TreePlan", "BackendError"}
    results = {name for name in spiral_kernels.__all__ if hasattr(getattr(spiral_kernels, name), "_fields")}
    rows = {row[0].strip("`") for row in table("function")}
    assert rows == set(spiral_kernels.__all__) - helpers - results | {"PrefixTree"}

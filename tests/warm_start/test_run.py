from __future__ import annotations

import torch

from spiral_fast.config import Config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import load_model
from spiral_fast.problems import load_problems
from spiral_fast.prompts import make_prompts
from spiral_fast.warm_start.run import warm_start

CONFIG = Config(
    run_dir="unused",
    model={"path": "builtin:parts", "dtype": "float32", "lora": {"rank": 4}},
    problems={"source": "parts", "train_size": 20, "eval_size": 4},
    rollout={"max_prompt_tokens": 32},
    warm_start={"steps": 6, "learning_rate": 3e-3, "search_examples": 4, "aggregation_examples": 2},
)


def run(config: Config):
    torch.manual_seed(config.seed)
    loaded = load_model(config.model, "cpu")
    learner = Learner(config, loaded)
    rates = []
    step = learner.supervised_step
    learner.supervised_step = lambda rows, rate: (rates.append((len(rows), rate)), step(rows, rate))[1]
    seen = []
    losses = warm_start(
        config, learner, make_prompts(config, loaded.tokenizer), load_problems(config), lambda *at: seen.append(at)
    )
    weights = {name: p.detach().clone() for name, p in loaded.model.named_parameters() if p.requires_grad}
    return losses, weights, rates, seen


def test_steps_rates_progress_and_the_same_seed_gives_the_same_weights():
    losses, weights, rates, seen = run(CONFIG)
    again, same, _, _ = run(CONFIG)
    assert losses == again and all(torch.equal(weights[name], same[name]) for name in weights)
    assert rates == [(6, 3e-3 * (1 - step / 6)) for step in range(6)]
    assert seen == [(step, 6) for step in range(1, 7)]
    assert 0.1 < losses[0] < 0.8  # the shipped model already speaks the task: not the log(68) of a fresh one
    assert any(weight.abs().sum() > 0 for name, weight in weights.items() if "lora_B" in name)


def test_the_warm_start_repairs_a_base_with_noise_in_its_weights():
    config = CONFIG.model_copy(
        update={
            "warm_start": CONFIG.warm_start.model_copy(update={"steps": 30, "learning_rate": 1e-2}),
            "problems": CONFIG.problems.model_copy(update={"variable_length": True}),
        }
    )
    torch.manual_seed(0)
    loaded = load_model(config.model, "cpu")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if not parameter.requires_grad and parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    losses = warm_start(config, Learner(config, loaded), make_prompts(config, loaded.tokenizer), load_problems(config))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])

"""`evaluate` on the shipped model with the embedded engine: shared prefixes, and the same result twice."""

from __future__ import annotations

import pytest
import torch

from spiral_fast.config import Config
from spiral_fast.evaluate import evaluate
from spiral_fast.learner.model import load_model
from spiral_fast.problems import load_problems
from spiral_fast.prompts import make_prompts
from spiral_fast.rewards import make_grader
from spiral_fast.rollout.radix.engine import RadixEngine


@pytest.mark.slow
def test_shipped_model():
    config = Config.model_validate(
        {
            "run_dir": "runs/x",
            "model": {"path": "builtin:parts", "dtype": "float32"},
            "problems": {"source": "parts", "train_size": 8, "eval_size": 12},
            "rollout": {"search_max_new_tokens": 32, "aggregation_max_new_tokens": 32},
            "evaluate": {"samples": 16, "pass_at": [1, 16], "majority_at": [4], "rsa": {"steps": 2}, "bootstrap": 100},
        }
    )
    torch.manual_seed(0)
    loaded = load_model(config.model, "cpu")
    prompts = make_prompts(config, loaded.tokenizer)
    problems = load_problems(config).eval

    def run():
        engine = RadixEngine(
            loaded.causal_lm,
            loaded.eos_token_ids,
            max_context=loaded.max_context,
            max_running=64,
            prefill_chunk=512,
            cache_tokens=65536,
        )
        with make_grader(config) as grader:
            return evaluate(config, engine, prompts, grader, problems, step=0)

    result = run()
    assert result == run()
    search, *steps = result["stages"]
    assert search["tokens"]["computed"] <= search["tokens"]["prompt"] / 16  # 16 siblings, one prefill
    for stage in steps:
        assert 0 < stage["tokens"]["computed"] < stage["tokens"]["prompt"]
    assert search["no_answer_share"] < 0.2 and search["entropy"] > 0
    assert 0 < result["pass_at_k"]["1"] < result["pass_at_k"]["16"]
    assert result["rsa"][2] > result["rsa"][0]  # the warm start taught it to combine the candidates' parts

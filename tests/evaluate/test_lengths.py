"""The length sweep grades prefixes; it must equal sampling anew with max_new_tokens = L."""

from __future__ import annotations

import pytest
import torch

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.evaluate.sampling import Sampler
from spiral_fast.learner.model import load_model
from spiral_fast.problems import load_problems
from spiral_fast.prompts import make_prompts
from spiral_fast.rewards import make_grader
from spiral_fast.rollout.make_engine import make_engine
from tests.evaluate.max_game import MaxEngine
from tests.evaluate.test_run import make_config, run

LIMITS = [17, 18, 19, 24, 25, 30, 31]


def test_a_limit_in_the_max_game():
    """One token shows the digit: the verdict is the same as of both, and a cut trace ends with "length"."""
    engine = MaxEngine()
    result = run(make_config(lengths=[1, 2]), engine)
    assert result["lengths"] == {"1": result["pass_at_k"]["1"], "2": result["pass_at_k"]["1"]}
    assert len([r for r in engine.requests if r.key.level == 0]) == 4 * 12
    points = {p["at"]: p for p in result["budget"] if p["method"] == "length"}
    assert [points[at]["generated"] for at in (1, 2, 3)] == [1, 2, 2]
    assert points[3]["accuracy"] == result["pass_at_k"]["1"] and points[3]["interval"] == points[1]["interval"]


@pytest.mark.slow
def test_prefixes_are_what_a_shorter_limit_samples():
    """On the shipped model, whose traces of the variable task have 19 tokens or more; a limit at a trace's exact length
    (19, 25, 31) and one less decide its verdict. Equal up to rounding, which may turn a token (1 in about 10^6): other
    requests share the forward."""
    settings = {
        "run_dir": "runs/x",
        "model": {"path": "builtin:parts", "dtype": "float32"},
        "problems": {"source": "parts", "train_size": 8, "eval_size": 24, "variable_length": True},
        "rollout": {"search_max_new_tokens": 48, "aggregation_max_new_tokens": 48, "cache_tokens": 65536},
    }
    config = Config.model_validate(settings | {"evaluate": {"lengths": LIMITS}})
    torch.manual_seed(0)
    loaded = load_model(config.model, "cpu")
    prompts, problems = make_prompts(config, loaded.tokenizer), load_problems(config).eval

    def sample(config: Config):
        with make_grader(config) as grader:
            return Sampler(config, make_engine(config, loaded), prompts, grader, lambda: None).search(problems, 12)

    long, same, right = sample(config), [], set()
    for place, limit in enumerate(LIMITS):
        rollout = settings["rollout"] | {"search_max_new_tokens": limit}
        short = sample(Config.model_validate(settings | {"rollout": rollout}))
        for a, b in zip(sum(long, []), sum(short, []), strict=True):
            same.append(a.tokens[:limit] == b.tokens)
            if same[-1]:
                assert a.at_limit[place] == b.verdict
                assert b.finish_reason == ("length" if len(a.tokens) > limit else a.finish_reason)
            right |= {(limit, b.verdict)}
    assert len(same) == len(LIMITS) * 24 * 12 and sum(same) >= len(same) - 2
    assert {(limit, "correct") for limit in LIMITS[2:]} < right and (18, "correct") not in right


def test_a_limit_that_cuts_nothing_is_refused():
    with pytest.raises(ConfigError, match="evaluate.lengths: 24 cannot be used: must be below rollout.search_max_new"):
        load_config("configs/demo.yaml", ["evaluate.lengths=[12, 24]"])

from __future__ import annotations

from spiral_fast.config import load_config
from spiral_fast.rollout.fits import worst_case
from spiral_fast.set_up import set_up

SMALL = ["problems.train_size=8", "problems.eval_size=4", "threads=1"]


def test_sets_that_no_prompt_quotes_need_no_room():
    config = load_config("configs/demo_poly_epo.yaml", [*SMALL, "rollout.set_size=6"])
    parts = set_up(config)
    quoted_by_rsa = worst_case(config, parts.prompts, parts.problems.train)
    assert (
        quoted_by_rsa.aggregation_prompt == len(parts.prompts.aggregation(parts.problems.train[0], [[]] * 4)) + 4 * 24
    )
    config = load_config("configs/demo_poly_epo.yaml", [*SMALL, "rollout.set_size=6", "evaluate.rsa.steps=0"])
    assert worst_case(config, parts.prompts, parts.problems.train).aggregation_prompt == 0

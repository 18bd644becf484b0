from __future__ import annotations

import pytest

from spiral_fast.config import ConfigError, load_config
from spiral_fast.rollout.fits import check_fits, worst_case
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


SERVER = "rollout.servers=['http://127.0.0.1:1']"


@pytest.mark.parametrize(
    ("overrides", "cuda", "is_bounded"),
    [
        ([], False, True),
        (["rollout.engine=radix"], True, True),
        (["rollout.engine=sglang"], False, True),
        (["rollout.engine=sglang"], True, False),
        ([SERVER], False, False),
        ([SERVER], True, False),
    ],
)
def test_cache_tokens_bounds_no_cache_that_a_server_sizes_itself(overrides, cuda, is_bounded):
    parts = set_up(load_config("configs/demo.yaml", SMALL))
    config = load_config("configs/demo.yaml", [*SMALL, "rollout.cache_tokens=10", *overrides])
    check = (config, parts.prompts, parts.problems.train, parts.loaded.max_context)
    if is_bounded:
        with pytest.raises(ConfigError, match="rollout.cache_tokens: 10 cannot be used"):
            check_fits(*check, cuda=cuda)
    else:
        assert check_fits(*check, cuda=cuda).longest > 10

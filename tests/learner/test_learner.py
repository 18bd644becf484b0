from __future__ import annotations

import dataclasses
import gc
import math
import os
import re
import signal

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spiral_fast.learner.learner import Learner
from tests.learner.tiny import (
    FAMILIES,
    RAGGED,
    config,
    gradient_of_step,
    largest_difference,
    loaded,
    make_rows,
    plain_gradient,
    plain_log_probs,
    plain_logits,
    plain_loss,
    plain_peft,
    weights,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_gradient_is_the_plain_one(family, temperature):
    learner = Learner(config(temperature, micro_batch_tokens=40), loaded(family))
    gradient, stats = gradient_of_step(learner, RAGGED)
    truth = plain_peft(family)
    assert largest_difference(gradient, plain_gradient(truth, RAGGED, temperature)) < 1e-12
    assert stats.loss == pytest.approx(plain_loss(truth, RAGGED, temperature).item(), rel=1e-12)
    assert stats.micro_batches > 2


def test_gradient_agrees_with_finite_differences_at_ratios_far_from_one():
    learner = Learner(config(0.8), loaded())
    rows = make_rows([(5, 7), (3, 4), (8, 2)], off_policy=1.0)
    gradient, stats = gradient_of_step(learner, rows)
    assert stats.ratio_max > 2
    generator = torch.Generator().manual_seed(3)
    direction = {name: torch.randn(g.shape, generator=generator, dtype=g.dtype) for name, g in gradient.items()}

    def loss(step: float) -> float:
        with torch.no_grad():
            for name, parameter in learner.parameters.items():
                parameter.add_(direction[name], alpha=step)
        return -sum(
            row.weight * row.credit * np.exp(logp - row.rollout_logp).sum()
            for row, logp in zip(rows, learner.log_probs(rows), strict=True)
        )

    h = 1e-5
    slope = (loss(h) - loss(-2 * h)) / (2 * h)
    assert slope == pytest.approx(sum((gradient[n] * direction[n]).sum().item() for n in gradient), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_at_the_sampling_temperature_on_ragged_lengths(temperature):
    rows = make_rows([(p, n) for p in (1, 2, 100) for n in (1, 2, 127, 128, 129)])
    learner = Learner(config(temperature, micro_batch_tokens=500), loaded())
    truth = plain_peft("qwen3")
    for row, logp in zip(rows, learner.log_probs(rows), strict=True):
        expected = plain_log_probs(truth, row, temperature).detach().numpy()
        np.testing.assert_allclose(logp, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gradient_does_not_depend_on_the_split(dtype, tolerance):
    rows = make_rows([(10, 7)] * 8)
    gradients, splits = [], []
    for budget in (8 * 16, 4 * 16, 2 * 16, 16):
        gradient, stats = gradient_of_step(Learner(config(micro_batch_tokens=budget), loaded(dtype=dtype)), rows)
        gradients.append(gradient)
        splits.append(stats.micro_batches)
    assert splits == [2, 2, 4, 8]  # search and aggregation rows are never mixed
    scale = max(g.abs().max().item() for g in gradients[0].values())
    assert all(largest_difference(g, gradients[0]) <= tolerance * scale for g in gradients)


@pytest.mark.parametrize("lengths", [[(6, 5)] * 4, [(6, 5), (6, 5), (9, 4), (3, 1)]])
def test_documents_do_not_leak(lengths):
    rows = make_rows(lengths)
    learner = Learner(config(), loaded(dtype=torch.float32))
    before = learner.log_probs(rows)
    for changed, row in enumerate(rows):
        other = dataclasses.replace(row, prompt=[t + 1 if t < 40 else t - 1 for t in row.prompt])
        after = learner.log_probs([*rows[:changed], other, *rows[changed + 1 :]])
        for index, (a, b) in enumerate(zip(before, after, strict=True)):
            assert np.array_equal(a, b) == (index != changed)


def test_two_updates_are_those_of_plain_adamw():
    settings = dict(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, warmup_steps=3)
    learner = Learner(config(**settings), loaded())
    truth = plain_peft("qwen3")
    parameters = [p for p in truth.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for update in (1, 2):
        stats = learner.step(RAGGED)
        assert stats.policy_version == learner.policy_version == update
        assert stats.learning_rate == pytest.approx(3e-3 * update / 3)
        adamw.param_groups[0]["lr"] = 3e-3 * update / 3
        adamw.zero_grad()
        plain_loss(truth, RAGGED, 1.0).backward()
        adamw.step()
    expected = {name: p.detach() for name, p in truth.named_parameters() if p.requires_grad}
    assert largest_difference(weights(learner), expected) < 1e-11


def test_dead_rows_are_not_computed_and_change_nothing():
    dead = [dataclasses.replace(row, credit=0.0) for row in make_rows([(30, 20), (4, 4)], seed=9)]
    with_dead, stats = gradient_of_step(Learner(config(), loaded()), [dead[0], *RAGGED, dead[1]])
    without, plain_stats = gradient_of_step(Learner(config(), loaded()), RAGGED)
    assert largest_difference(with_dead, without) == 0
    assert stats.tokens_computed == plain_stats.tokens_computed == sum(r.computed_tokens for r in RAGGED)
    assert stats.tokens_logical == plain_stats.tokens_logical + 50 + 8
    assert (stats.rows, stats.live_rows) == (len(RAGGED) + 2, len(RAGGED))


def test_checkpointing_gives_the_same_bits():
    plain, _ = gradient_of_step(Learner(config(), loaded()), RAGGED)
    recomputed, _ = gradient_of_step(Learner(config(checkpointing=True), loaded()), RAGGED)
    assert largest_difference(plain, recomputed) == 0


def test_statistics():
    temperature = 0.7
    _, stats = gradient_of_step(Learner(config(temperature, micro_batch_tokens=30), loaded()), RAGGED)
    truth = plain_peft("qwen3")
    log_ratio = torch.cat(
        [plain_log_probs(truth, row, temperature) - torch.from_numpy(row.rollout_logp) for row in RAGGED]
    ).detach()
    assert stats.logp_gap_mean == pytest.approx(log_ratio.abs().mean().item(), rel=1e-9)
    assert stats.logp_gap_max == pytest.approx(log_ratio.abs().max().item(), rel=1e-9)
    assert stats.kl == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-9)
    assert stats.ratio_max == pytest.approx(log_ratio.exp().max().item(), rel=1e-9)
    assert stats.tokens_trained == log_ratio.numel()
    assert stats.entropy.keys() == {0, 1}
    for level, entropy in stats.entropy.items():
        rows = [row for row in RAGGED if row.level == level]
        laws = torch.cat([(plain_logits(truth, row) / temperature).log_softmax(-1) for row in rows])
        assert entropy == pytest.approx(-(laws.exp() * laws).sum(-1).mean().item(), rel=1e-9)
    terms = []
    for level in (0, 1):
        gradient = plain_gradient(truth, [row for row in RAGGED if row.level == level], temperature)
        terms.append(torch.cat([g.flatten() for g in gradient.values()]))
    assert stats.search_gradient_norm == pytest.approx(terms[0].norm().item(), rel=1e-9)
    assert stats.aggregation_gradient_norm == pytest.approx(terms[1].norm().item(), rel=1e-9)
    assert stats.gradient_norm == pytest.approx((terms[0] + terms[1]).norm().item(), rel=1e-9)
    assert stats.gradient_cosine == pytest.approx(torch.cosine_similarity(*terms, dim=0).item(), rel=1e-9)


@pytest.mark.parametrize("level", [0, 1])
def test_one_term_alone_has_no_cosine(level):
    rows = [row for row in RAGGED if row.level == level]
    _, stats = gradient_of_step(Learner(config(), loaded()), rows)
    norms = (stats.search_gradient_norm, stats.aggregation_gradient_norm)
    assert norms[level] == stats.gradient_norm > 0 and norms[1 - level] == 0
    assert stats.gradient_cosine is None


def test_clipping():
    free, stats = gradient_of_step(Learner(config(), loaded()), RAGGED)
    assert (stats.clipped, stats.clip_factor) == (False, 1.0)
    limit = stats.gradient_norm / 4
    clipped, stats = gradient_of_step(Learner(config(clip_norm=limit), loaded()), RAGGED)
    assert stats.clipped and stats.clip_factor == pytest.approx(0.25)
    assert stats.gradient_norm == pytest.approx(4 * limit)  # before clipping
    assert largest_difference(clipped, {name: g / 4 for name, g in free.items()}) < 1e-12


def _everything(learner: Learner) -> dict[str, torch.Tensor]:
    state = {
        f"{name}.{key}": value.clone()
        for name, parameter in learner.parameters.items()
        for key, value in learner.optimiser.state[parameter].items()
    }
    return state | weights(learner)


def _broken(index: int, logp: float) -> list:
    """RAGGED, one rollout log-prob of one row replaced."""
    rows = list(RAGGED)
    changed = rows[index].rollout_logp.copy()
    changed[-1] = logp
    rows[index] = dataclasses.replace(rows[index], rollout_logp=changed)
    return rows


def _dead(rows) -> list:
    return [dataclasses.replace(row, credit=0.0) for row in rows]


SKIPPED = {  # rows -> reason, rows that are blamed
    "no rows": ([], "no live row", []),
    "no live row": (_dead(RAGGED), "no live row", []),
    "rollout nan": (_broken(3, np.nan), "a rollout log-prob is not finite", [3]),
    "rollout -inf": (_broken(0, -np.inf), "a rollout log-prob is not finite", [0]),
    "rollout +inf, whose ratio is 0": (_broken(7, np.inf), "a rollout log-prob is not finite", [7]),
    "rollout nan of a dead row": ([*RAGGED, *_dead(_broken(2, np.nan))], "a rollout log-prob is not finite", [10]),
    "no live row and a rollout nan": (_dead(_broken(1, np.nan)), "a rollout log-prob is not finite", [1]),
    "ratio overflows": (_broken(4, -1e4), "loss is (-inf|inf)", [4]),
    "credit nan": ([RAGGED[0], dataclasses.replace(RAGGED[1], credit=np.nan), RAGGED[2]], "loss is nan", [1]),
    "credits of both infinities": (
        [*RAGGED[:2], *(dataclasses.replace(RAGGED[i], credit=c) for i, c in ((2, np.inf), (4, -np.inf)))],
        "loss is nan",
        [2, 3],
    ),
    "weight inf": ([*RAGGED, dataclasses.replace(RAGGED[1], weight=np.inf)], "loss is (-inf|inf)", [8]),
}


@pytest.mark.parametrize("fault", SKIPPED)
@pytest.mark.parametrize("clip_norm", [None, 1e300])
def test_a_step_that_cannot_be_made_touches_nothing(fault, clip_norm):
    learner = Learner(config(weight_decay=0.1, warmup_steps=10, clip_norm=clip_norm), loaded())
    learner.step(RAGGED)
    before = _everything(learner)
    rows, reason, blamed = SKIPPED[fault]
    stats = learner.step(rows)
    _check_skipped(learner, stats, before, reason, blamed)
    assert learner.step(RAGGED).learning_rate == pytest.approx(1e-2 * 2 / 10)  # the skipped step did not count


def _check_skipped(learner, stats, before, reason, blamed) -> None:
    assert re.fullmatch(reason, stats.skipped_reason), stats.skipped_reason
    assert stats.skipped_rows == blamed
    assert (stats.policy_version, learner.policy_version, learner.optimiser_steps) == (1, 1, 1)
    after = _everything(learner)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in learner.parameters.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_blames_every_live_row(value):
    """One element of one matrix, by a hook on the way to it; clipping must not spread it into the others."""
    learner = Learner(config(clip_norm=1.0), loaded())
    learner.step(RAGGED)
    before = _everything(learner)
    parameter = list(learner.parameters.values())[3]
    hook = parameter.register_hook(lambda g: g.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value).to(g)))
    rows = [*_dead(RAGGED[:1]), *RAGGED]
    stats = learner.step(rows)
    _check_skipped(learner, stats, before, f"gradient norm is {value}", list(range(1, len(rows))))
    assert math.isfinite(stats.loss) and not stats.clipped
    hook.remove()
    assert learner.step(RAGGED).skipped_reason is None


def test_a_gradient_whose_square_overflows_never_reaches_the_moments():
    """An infinite second moment would freeze its parameter for good, with every number of the step finite."""
    rows = [dataclasses.replace(row, credit=row.credit * 1e21) for row in RAGGED]
    learner = Learner(config(), loaded(dtype=torch.float32))
    learner.step(RAGGED)
    before = _everything(learner)
    stats = learner.step(rows)
    words = r"gradient norm is .*e\+2., whose square AdamW cannot hold"
    _check_skipped(learner, stats, before, words, list(range(len(rows))))
    clipped = Learner(config(clip_norm=1.0), loaded(dtype=torch.float32))
    assert clipped.step(rows).skipped_reason is None  # clipping is what brings such a gradient back
    assert all(value.isfinite().all() for value in _everything(clipped).values())


@pytest.mark.parametrize("name", ["q_proj.lora_A", "v_proj.lora_B", "down_proj.lora_B", "up_proj.lora_A"])
@pytest.mark.parametrize("lengths", [[(20, 7), (20, 9)], [(2, 1), (1, 3)]])
def test_weights_that_are_not_finite(name, lengths):
    """In short rows torch's CPU attention may turn NaN scores into an output of 0: then only the gradient tells."""
    learner = Learner(config(micro_batch_tokens=20), loaded())
    learner.step(RAGGED)
    with torch.no_grad():
        next(p for key, p in learner.parameters.items() if name in key)[0, 0] = torch.nan
    bits = {key: value.numpy().tobytes() for key, value in _everything(learner).items()}
    stats = learner.step(make_rows(lengths))
    assert stats.skipped_rows == [0, 1]
    hidden = lengths[0][0] == 2 and name == "q_proj.lora_A"
    reasons = ["a learner log-prob is not finite", *(["gradient norm is nan"] if hidden else [])]
    assert stats.skipped_reason in reasons
    assert {key: value.numpy().tobytes() for key, value in _everything(learner).items()} == bits


def test_a_log_prob_of_minus_infinity_is_not_taken_for_a_ratio_of_zero():
    """Loss and gradient of a token whose logit is -inf are finite; its log-prob is not, and so is no ratio."""
    parts = loaded()
    learner = Learner(config(), parts)
    learner.step(RAGGED)
    before = _everything(learner)
    policy = learner.policy.forward

    def one_token_impossible(packed, *args, **kwargs):
        out = policy(packed, *args, **kwargs)
        logits = torch.zeros_like(out.logp)
        logits[0] = -torch.inf
        return out._replace(logp=out.logp + logits)

    learner.policy.forward = one_token_impossible
    stats = learner.step(RAGGED[3:6])
    _check_skipped(learner, stats, before, "a learner log-prob is not finite", [0, 1])  # the shortest of each level
    assert math.isfinite(stats.loss) and math.isfinite(stats.gradient_norm)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_supervised_step_that_cannot_be_made(fault):
    learner = Learner(config(), loaded())
    learner.supervised_step(RAGGED, 1e-3)
    parameter = list(learner.parameters.values())[0]
    if fault == "gradient":
        parameter.register_hook(lambda g: g * torch.nan)
    else:
        parameter.data[0, 0] = torch.nan
    before = [value.numpy().tobytes() for value in weights(learner).values()]
    words = {"loss": "cross-entropy is nan", "gradient": "gradient norm is nan"}[fault]
    with pytest.raises(FloatingPointError, match=f"{words}; lower warm_start.learning_rate"):
        learner.supervised_step(RAGGED, 1e-3)
    assert before == [value.numpy().tobytes() for value in weights(learner).values()]
    assert all(parameter.grad is None for parameter in learner.parameters.values())


@pytest.mark.parametrize("update", ["step", "supervised_step"])
def test_ctrl_c_never_cuts_an_update_in_half(update):
    learner = Learner(config(), loaded())
    before = weights(learner)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = register_optimizer_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            learner.step(RAGGED) if update == "step" else learner.supervised_step(RAGGED, learning_rate=1e-2)
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, previous)
    assert learner.policy_version == 1
    assert all((moved != before[name]).any() for name, moved in weights(learner).items())


def test_supervised_step_is_the_mean_cross_entropy_with_moments_of_its_own():
    learner = Learner(config(temperature=0.7, micro_batch_tokens=30), loaded())
    learner.step(RAGGED)
    truth = plain_peft("qwen3")
    truth.load_state_dict(learner.policy.model.state_dict())
    state = {k: v.clone() for k, v in _everything(learner).items() if k.endswith(("exp_avg", "exp_avg_sq", "step"))}
    logp = torch.cat([plain_log_probs(truth, row, 1.0) for row in RAGGED])
    loss = learner.supervised_step(RAGGED, learning_rate=1e-2)
    assert loss == pytest.approx(-logp.mean().item(), rel=1e-12)
    parameters = [p for p in truth.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    (-logp.mean()).backward()
    adamw.step()
    expected = {name: p.detach() for name, p in truth.named_parameters() if p.requires_grad}
    assert largest_difference(weights(learner), expected) < 1e-11
    after = _everything(learner)
    assert largest_difference({key: after[key] for key in state}, state) == 0
    assert learner.policy_version == 2
    assert learner.supervised_step(RAGGED, learning_rate=1e-2) < loss


def test_nothing_of_the_graph_outlives_a_step():
    def in_a_graph() -> dict[int, torch.Tensor]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return {id(t): t for t in tensors if t.grad_fn is not None}

    before = in_a_graph()  # held by earlier tests
    learner = Learner(config(micro_batch_tokens=20), loaded())
    stats = learner.step(RAGGED)
    assert stats.micro_batches > 3 and not in_a_graph().keys() - before.keys()


def test_only_the_adapter_moves_and_its_version_counters_show_it():
    learner = Learner(config(), loaded())
    before = {name: (p.detach().clone(), p._version) for name, p in learner.policy.named_parameters()}
    learner.step(RAGGED)
    for name, parameter in learner.policy.named_parameters():
        value, version = before[name]
        assert torch.equal(parameter, value) == (parameter._version == version) == ("lora_" not in name), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "row 1: prompt and tokens must not be empty"),
        ({"tokens": []}, "row 1: prompt and tokens must not be empty"),
        ({"rollout_logp": None}, "row 1: needs one rollout log-prob for each of its 7 tokens"),
        ({"rollout_logp": np.zeros(6, np.float32)}, "row 1: needs one rollout log-prob for each of its 7 tokens"),
        ({"prompt": [3] * 250}, "row 1: 257 tokens exceed the model's context of 256"),
    ],
)
def test_bad_rows_are_named(change, message):
    learner = Learner(config(), loaded())
    with pytest.raises(ValueError, match=message):
        learner.step([RAGGED[0], dataclasses.replace(RAGGED[1], **change)])

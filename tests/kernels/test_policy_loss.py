"""policy_loss against a loop over tokens in plain Python floats; token_weights against fractions."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction
from statistics import fmean as mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import spiral_kernels
from spiral_kernels import available_backends, force_backend
from spiral_kernels.policy_loss import LOSSES, PolicyLoss, policy_loss, token_weights

BACKENDS = [name for name, why_not in available_backends("policy_loss").items() if why_not is None]
INF = math.inf

# Every loss with and without the settings that belong to it; `old`: is a proximal policy given.
SETTINGS = [
    ("importance_sampling", {}),
    ("importance_sampling", {"old": True}),
    ("importance_sampling", {"old": True, "tis_cap": 1.1}),
    ("importance_sampling", {"old": True, "token_mask": (0.7, 1.5), "kl_coef": 0.3, "kl": "k1"}),
    ("importance_sampling", {"off_policy_mask": 0.05}),
    ("reinforce", {"kl_coef": 0.3, "kl": "k2"}),
    ("reinforce", {"old": True, "tis_cap": 0.9, "sequence_mask": (0.8, 1.2)}),
    ("ppo_clip", {"clip": (0.2, 0.28)}),
    ("ppo_clip", {"clip": (0.2, None), "kl_coef": 0.5}),
    ("ppo_clip", {"clip": (None, 0.1), "old": True}),
    ("ppo_clip", {"clip": (0.1, 0.3), "dual_clip": 1.4, "old": True, "tis_cap": 1.2, "kl_coef": 0.1}),
    ("cispo", {"clip": (None, 0.2)}),
    ("cispo", {"clip": (0.3, 0.2), "old": True, "tis_cap": 1.1, "off_policy_mask": 0.1}),
    ("gspo", {"clip": (0.05, 0.08)}),
    ("gspo", {"clip": (0.05, 0.08), "dual_clip": 1.1, "old": True, "tis_cap": 1.1, "kl_coef": 0.2}),
    ("gspo", {"clip": (0.1, 0.1), "old": True, "token_mask": (0.8, 1.4), "sequence_mask": (0.7, 1.3)}),
]


@pytest.fixture(params=BACKENDS)
def backend(request):
    force_backend(request.param, "policy_loss")
    yield request.param
    force_backend(None, "policy_loss")


class Batch:
    """Log-probs of the three policies and the reference around one another, weights with zeros, credits with zeros."""

    def __init__(self, lengths, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        n_tokens = sum(lengths)

        def near(x, spread=0.4):
            return (x.double() + spread * torch.randn(n_tokens, generator=generator, dtype=torch.float64)).to(dtype)

        self.logp = near(torch.full((n_tokens,), -2.0))
        self.rollout, self.old, self.ref = near(self.logp), near(self.logp), near(self.logp)
        self.weight = torch.rand(n_tokens, generator=generator, dtype=torch.float64).to(dtype)
        self.weight[torch.rand(n_tokens, generator=generator) < 0.2] = 0
        self.credit = torch.randn(len(lengths), generator=generator, dtype=torch.float64).to(dtype)
        self.credit[torch.rand(len(lengths), generator=generator) < 0.2] = 0
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def run(self, loss, *, old=False, weight=True, **settings):
        logp = self.logp.clone().requires_grad_()
        out = policy_loss(
            logp,
            self.rollout,
            self.credit,
            self.cu_seqlens,
            old_logp=self.old if old else None,
            ref_logp=self.ref,
            token_weight=self.weight if weight else None,
            loss=loss,
            **settings,
        )
        (d_logp,) = torch.autograd.grad(out.loss, logp)
        return out, d_logp

    def brute_force(self, loss, *, old=False, **settings):
        """(loss, *statistics) and the gradient by central differences, in Python floats."""
        lists = {
            name: getattr(self, name).double().tolist()
            for name in ("logp", "rollout", "old", "ref", "weight", "credit")
        }
        if not old:
            lists["old"] = lists["rollout"]
        offsets = self.cu_seqlens.tolist()
        at = loop_over_tokens(lists, offsets, lists["logp"], loss, **settings)
        gradient, step = [], 1e-6
        for t in range(len(lists["logp"])):
            sides = []
            for sign in (1, -1):
                moved = list(lists["logp"])
                moved[t] += sign * step
                sides.append(loop_over_tokens(lists, offsets, moved, loss, **settings)[0])
            gradient.append((sides[0] - sides[1]) / (2 * step))
        return at, gradient


def loop_over_tokens(
    x,
    offsets,
    logp,
    loss,
    *,
    clip=(None, None),
    dual_clip=None,
    tis_cap=INF,
    token_mask=(0, INF),
    sequence_mask=(0, INF),
    off_policy_mask=INF,
    kl_coef=0.0,
    kl="k3",
):
    """The loss as a function of logp, where x["logp"] are the values that carry no gradient; then the statistics."""
    low = -INF if clip[0] is None else 1 - clip[0]
    high = INF if clip[1] is None else 1 + clip[1]
    total, ratios, below, above, n_credited, kls = 0.0, [], 0, 0, 0, []
    for i, credit in enumerate(x["credit"]):
        tokens = [t for t in range(offsets[i], offsets[i + 1]) if x["weight"][t] != 0]
        for t in tokens:
            d = logp[t] - x["ref"][t]
            kls.append({"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kl])
            total += x["weight"][t] * kl_coef * kls[-1]
        if not tokens or credit == 0:
            continue
        n_credited += len(tokens)

        geometric = math.exp(mean([x["old"][t] - x["rollout"][t] for t in tokens]))
        if not sequence_mask[0] <= geometric <= sequence_mask[1]:
            continue
        if credit < 0 and mean([x["rollout"][t] - x["logp"][t] for t in tokens]) > off_policy_mask:
            continue
        of_sequence = math.exp(mean([logp[t] - x["old"][t] for t in tokens]))
        for t in tokens:
            w = math.exp(x["old"][t] - x["rollout"][t])
            if not token_mask[0] <= w <= token_mask[1]:
                continue
            r = of_sequence if loss == "gspo" else math.exp(logp[t] - x["old"][t])
            fixed = math.exp(x["logp"][t] - x["old"][t])
            ratios.append(r)
            if loss == "importance_sampling":
                surrogate = -r * credit
            elif loss == "reinforce":
                surrogate = -logp[t] * credit
            elif loss == "cispo":
                surrogate = -min(max(fixed, low), high) * credit * logp[t]
                below, above = below + (fixed < low), above + (fixed > high)
            else:
                objective = min(r * credit, min(max(r, low), high) * credit)
                if credit < 0 and dual_clip is not None:
                    above += r > dual_clip
                    objective = max(objective, dual_clip * credit)
                surrogate = -objective
                below, above = below + (credit < 0 and r < low), above + (credit > 0 and r > high)
            total += x["weight"][t] * min(w, tis_cap) * surrogate
    n_live = max(len(ratios), 1)
    return (
        total,
        sum(ratios) / n_live if ratios else 1,
        max(ratios, default=1),
        below / n_live,
        above / n_live,
        (n_credited - len(ratios)) / max(n_credited, 1),
        sum(kls) / max(len(kls), 1),
    )


def check(batch, loss, absolute=1e-10, **settings):
    out, d_logp = batch.run(loss, **settings)
    expected, gradient = batch.brute_force(loss, **settings)
    torch.testing.assert_close(
        torch.stack(out).detach().double(), torch.tensor(expected, dtype=torch.float64), rtol=absolute, atol=absolute
    )
    gradient = torch.tensor(gradient, dtype=torch.float64)
    torch.testing.assert_close(d_logp.double(), gradient, rtol=1e-6 + absolute, atol=1e-7 + absolute)
    return out, d_logp


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_value_gradient_and_statistics(backend, case):
    loss, of_loss = case
    batch = Batch([7, 0, 1, 12, 5, 20, 3, 9])
    check(batch, loss, **of_loss)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), max_size=6),
    seed=st.integers(0, 10_000),
    case=st.sampled_from(SETTINGS),
    name=st.sampled_from(BACKENDS),
)
def test_ragged_batches(lengths, seed, case, name):
    force_backend(name, "policy_loss")
    try:
        check(Batch(lengths, seed), case[0], **case[1])
    finally:
        force_backend(None, "policy_loss")


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_float32(backend, case):
    """No worse than the inputs' own precision; the truth is the loop on the same float32 numbers."""
    check(Batch([30, 2, 0, 11, 40], seed=3, dtype=torch.float32), case[0], absolute=2e-5, **case[1])


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_gradcheck(case):
    loss, of_loss = case[0], dict(case[1])
    if loss == "cispo" or "off_policy_mask" in of_loss:
        pytest.skip("stops the gradient: finite differences see another function; the loop above holds it fixed")
    batch = Batch([4, 0, 1, 6], seed=1)
    old = batch.old if of_loss.pop("old", False) else None

    def total(logp):
        return policy_loss(
            logp, batch.rollout, batch.credit, batch.cu_seqlens, old_logp=old, ref_logp=batch.ref, loss=loss, **of_loss
        ).loss

    assert torch.autograd.gradcheck(total, batch.logp.requires_grad_())


# loss, settings, ratio, credit -> loss, derivative by logp; by hand. logp = log ratio, so old_logp = 0.
BY_HAND = [
    ("importance_sampling", {}, 3.0, 2.0, -6.0, -6.0),
    ("reinforce", {}, 3.0, 2.0, -2.0 * math.log(3), -2.0),
    ("ppo_clip", {"clip": (0.2, 0.5)}, 1.4, 2.0, -2.8, -2.8),
    ("ppo_clip", {"clip": (0.2, 0.5)}, 1.6, 2.0, -3.0, 0.0),
    ("ppo_clip", {"clip": (0.2, 0.5)}, 0.1, 2.0, -0.2, -0.2),
    ("ppo_clip", {"clip": (0.2, 0.5)}, 0.9, -2.0, 1.8, 1.8),
    ("ppo_clip", {"clip": (0.2, 0.5)}, 0.7, -2.0, 1.6, 0.0),
    ("ppo_clip", {"clip": (0.2, 0.5)}, 9.0, -2.0, 18.0, 18.0),
    ("ppo_clip", {"clip": (0.2, 0.5), "dual_clip": 3.0}, 2.9, -2.0, 5.8, 5.8),
    ("ppo_clip", {"clip": (0.2, 0.5), "dual_clip": 3.0}, 9.0, -2.0, 6.0, 0.0),
    ("ppo_clip", {"clip": (0.2, 0.5), "dual_clip": 3.0}, 9.0, 2.0, -3.0, 0.0),
    ("ppo_clip", {"clip": (0.0, 0.0)}, 1.0, 2.0, -2.0, -2.0),  # on the bound: not clipped
    ("ppo_clip", {"clip": (0.0, 0.0)}, 1.0, -2.0, 2.0, 2.0),
    ("cispo", {"clip": (0.2, 0.5)}, 1.4, 2.0, -2.8 * math.log(1.4), -2.8),
    ("cispo", {"clip": (0.2, 0.5)}, 1.6, 2.0, -3.0 * math.log(1.6), -3.0),
    ("cispo", {"clip": (0.2, 0.5)}, 0.7, -2.0, 1.6 * math.log(0.7), 1.6),
    ("gspo", {"clip": (0.2, 0.5)}, 1.4, 2.0, -2.8, -2.8),
    ("gspo", {"clip": (0.2, 0.5)}, 1.6, 2.0, -3.0, 0.0),
]


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_both_sides_of_every_clip(backend, case):
    loss, of_loss, ratio, credit, value, derivative = case
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    out = policy_loss(logp, zero, zero + credit, torch.tensor([0, 1]), loss=loss, **of_loss)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(value, rel=1e-12)
    assert logp.grad.item() == pytest.approx(derivative, rel=1e-12)


def test_three_policies_are_kept_apart(backend):
    """r = pi / pi_old = 2 is clipped at 1.5, w = pi_old / mu = 4 is truncated at 3, KL is that to the reference."""
    logp = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    old, rollout, ref = -math.log(torch.tensor(2.0)), -math.log(8.0), -1.0
    inputs = {"old_logp": torch.tensor([old]).double(), "ref_logp": torch.tensor([ref]).double()}
    args = logp, torch.tensor([rollout]).double(), torch.tensor([1.0]).double(), torch.tensor([0, 1])
    out = policy_loss(*args, **inputs, loss="ppo_clip", clip=(0.5, 0.5), tis_cap=3.0, kl_coef=10.0, kl="k1")
    assert out.loss.item() == pytest.approx(-3 * 1.5 + 10, rel=1e-6)
    assert out.ratio_max.item() == pytest.approx(2, rel=1e-6)


def test_this_updates_policy_held_against_the_sampler(backend):
    """old_logp = logp.detach(): the truncated weight pi / mu times the policy gradient."""
    batch = Batch([5, 8])
    batch.old = batch.logp
    out, d_logp = batch.run("importance_sampling", old=True, tis_cap=1.2)
    w = (batch.logp - batch.rollout).exp().clamp(max=1.2)
    credit = batch.credit.repeat_interleave(torch.tensor([5, 8]))
    torch.testing.assert_close(d_logp, -batch.weight * w * credit)
    assert out.ratio_mean == 1


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_a_token_of_weight_0_is_never_read(backend, case):
    batch = Batch([6, 3, 0, 8], seed=2)
    clean = batch.run(case[0], **case[1])
    assert (batch.weight == 0).any()
    for values in (batch.logp, batch.rollout, batch.old, batch.ref):
        values[batch.weight == 0] = torch.nan
    out, d_logp = batch.run(case[0], **case[1])
    assert out == clean[0] and torch.equal(d_logp, clean[1])
    assert (d_logp[batch.weight == 0] == 0).all()


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_a_credit_of_0_gives_exactly_0(backend, case):
    loss, of_loss = case
    batch = Batch([6, 3, 8], seed=2)
    batch.credit[:] = 0
    batch.logp[4], batch.rollout[5], batch.old[7] = -torch.inf, torch.nan, torch.inf
    out, d_logp = batch.run(loss, **of_loss | {"kl_coef": 0.0})
    assert out.loss == 0 and (d_logp == 0).all() and out.ratio_mean == 1
    batch.logp[4] = -1
    out, d_logp = batch.run(loss, **of_loss | {"kl_coef": 0.5, "kl": "k3"})
    d = batch.logp - batch.ref
    torch.testing.assert_close(d_logp, 0.5 * batch.weight * (1 - (-d).exp()))


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_do(backend, loss):
    clip = {"clip": (0.2, 0.2)} if loss in ("ppo_clip", "cispo", "gspo") else {}
    for lengths, weight in (([], 1), ([0, 0], 1), ([3, 0, 1], 0)):
        batch = Batch(lengths)
        batch.weight[:] = weight
        out, d_logp = batch.run(loss, **clip)
        assert [x.item() for x in out] == [0, 1, 1, 0, 0, 0, 0]
        assert d_logp.shape == (sum(lengths),) and (d_logp == 0).all()


def test_all_sequences_masked(backend):
    batch = Batch([3, 4])
    batch.weight[:], batch.credit[:] = 1, 1
    out, d_logp = batch.run("importance_sampling", old=True, sequence_mask=(100, 200))
    assert out.loss == 0 and (d_logp == 0).all() and out.masked == 1


def test_a_ratio_that_overflows(backend):
    """On the clipped side it gives the bound and no gradient; elsewhere it shows."""
    batch = Batch([1, 1])
    batch.logp[:], batch.rollout[:] = 800.0, 0.0
    batch.weight[:], batch.credit[:] = 1, 1
    out, d_logp = batch.run("ppo_clip", clip=(0.2, 0.2))
    assert out.loss.item() == pytest.approx(-2.4)
    assert backend == "reference" or (d_logp == 0).all()  # autograd makes it inf * 0
    assert batch.run("importance_sampling")[0].loss == -torch.inf


def test_the_slope_of_k3_keeps_its_digits_near_0(backend):
    """exp(-d) - 1 as a difference would give 0 or noise there."""
    d = torch.cat([10.0 ** torch.arange(-12, 2), torch.tensor([0.0, 0.49999, 0.5, 0.50001, 30.0])])
    d = torch.cat([d, -d]).requires_grad_()
    zero = torch.zeros(len(d))
    if backend == "reference":
        pytest.skip("its truth is the formula itself, in float64")
    out = policy_loss(d, zero, zero[:1], torch.tensor([0, len(d)]), ref_logp=zero, kl_coef=1.0, kl="k3")
    (slope,) = torch.autograd.grad(out.loss, d)
    torch.testing.assert_close(slope.double(), -torch.expm1(-d.detach().double()), rtol=4e-7, atol=0)


def test_sums_are_in_float64(backend):
    """Of the loss, and of a sequence's log ratios; float32 would lose the middle token."""
    batch = Batch([3], dtype=torch.float32)
    batch.logp[:], batch.weight[:], batch.credit[:] = -1, torch.tensor([1e8, 1, -1e8]), 1
    assert batch.run("reinforce")[0].loss == 1
    batch.logp[:], batch.rollout[:], batch.weight[:] = torch.tensor([1e7, 0.3, -1e7]), 0, 1
    assert batch.run("gspo", clip=(1.0, 1.0))[0].ratio_max.item() == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("name", ["logp", "rollout", "old", "credit", "weight"])
def test_nan_that_counts_is_not_hidden(backend, name):
    batch = Batch([2])
    batch.weight[:], batch.credit[:] = 1, 1
    getattr(batch, name)[0] = torch.nan
    for loss, of_loss in SETTINGS:
        if of_loss.get("old") and not any(setting.endswith("mask") for setting in of_loss):
            out, _ = batch.run(loss, **of_loss)
            assert out.loss.isnan(), (loss, of_loss)
            assert out.ratio_mean.isnan() == out.ratio_max.isnan() == (name in ("logp", "old"))


def test_two_runs_are_bit_equal_and_sequences_do_not_touch(backend):
    batch = Batch([7, 3, 9])
    out, d_logp = batch.run("gspo", clip=(0.1, 0.1))
    again, d_again = batch.run("gspo", clip=(0.1, 0.1))
    assert out == again and torch.equal(d_logp, d_again)
    batch.logp[7:10] += 1
    _, moved = batch.run("gspo", clip=(0.1, 0.1))
    assert torch.equal(moved[:7], d_logp[:7]) and torch.equal(moved[10:], d_logp[10:])


def test_does_not_depend_on_the_cut_into_micro_batches(backend):
    lengths = [5, 1, 0, 7, 4]
    batch = Batch(lengths)
    for reduction in ("token_mean", "sequence_mean", "sequence_sum"):
        batch.weight = token_weights(reduction, batch.cu_seqlens)
        out, d_logp = batch.run("ppo_clip", clip=(0.1, 0.1), kl_coef=0.2)
        total, gradients = 0, []
        for first, last in ((0, 2), (2, 4), (4, 5)):
            part = Batch(lengths[first:last])
            tokens = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))
            for name in ("logp", "rollout", "old", "ref", "weight"):
                setattr(part, name, getattr(batch, name)[tokens])
            part.credit = batch.credit[first:last]
            of_part, gradient = part.run("ppo_clip", clip=(0.1, 0.1), kl_coef=0.2)
            total, gradients = total + of_part.loss, [*gradients, gradient]
        torch.testing.assert_close(total, out.loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.cat(gradients), d_logp, rtol=0, atol=0)


def test_dtypes(backend):
    batch = Batch([5, 8], dtype=torch.float32)
    batch.credit = torch.tensor([1, -2])
    batch.cu_seqlens = batch.cu_seqlens.int()
    batch.rollout = batch.rollout.bfloat16()
    out, d_logp = batch.run("importance_sampling")
    assert {x.dtype for x in out} == {torch.float32} and d_logp.dtype == torch.float32
    batch.rollout, batch.credit = batch.rollout.float(), batch.credit.float()
    torch.testing.assert_close(out.loss, batch.run("importance_sampling")[0].loss)


def op_arguments(batch, loss="gspo", with_gradient=True):
    tensors = batch.logp, batch.rollout, batch.credit, batch.cu_seqlens, batch.old, batch.ref, batch.weight
    return *tensors, loss, 0.9, 1.1, 2.0, 1.5, 0.3, "k3", 0.5, 2.0, 0.7, 1.4, 0.5, with_gradient


@pytest.mark.parametrize("loss", LOSSES)
def test_opcheck(loss):
    batch = Batch([3, 0, 4])
    batch.logp.requires_grad_()
    torch.library.opcheck(torch.ops.spiral_kernels.policy_loss.default, op_arguments(batch, loss))
    batch.logp = batch.logp.detach()
    torch.library.opcheck(torch.ops.spiral_kernels.policy_loss.default, op_arguments(batch, loss, False))


def test_the_gradient_has_no_gradient(backend):
    """Autograd would take the stored gradient for constant; only the reference is differentiable twice."""
    for linear in (True, False):
        batch = Batch([2, 3])
        batch.weight[:], batch.credit[:] = 1, 1
        logp = batch.logp.requires_grad_()
        loss = policy_loss(logp, batch.rollout, batch.credit, batch.cu_seqlens).loss
        (d_logp,) = torch.autograd.grad(loss if linear else loss.square(), logp, create_graph=True)
        penalty = d_logp.square().sum()
        if backend == "reference":
            penalty.backward()
        else:
            message = "policy_loss: its gradient has no gradient of its own"
            with pytest.raises(RuntimeError, match=message):
                torch.autograd.grad(penalty + logp.sum(), logp, retain_graph=True)
            with pytest.raises(RuntimeError, match=message):
                penalty.backward()


def test_compiles():
    batch = Batch([3, 0, 4])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def total(logp):
        logp = logp * 1.5
        return policy_loss(logp, batch.rollout, batch.credit, batch.cu_seqlens, loss="ppo_clip", clip=(0.2, 0.3)).loss

    logp = batch.logp.requires_grad_()
    found = torch.autograd.grad(total(logp), logp)
    plain = torch.autograd.grad(total.__wrapped__(logp), logp)
    torch.testing.assert_close(found, plain)
    torch.compiler.reset()  # or its cache keeps tensors with their graphs


def test_no_gradient_is_formed_under_no_grad():
    class LastArguments(TorchDispatchMode):
        found = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.spiral_kernels.policy_loss.default:
                self.found = args[-1]
            return func(*args, **(kwargs or {}))

    batch = Batch([3])
    batch.logp.requires_grad_()
    args = batch.logp, batch.rollout, batch.credit, batch.cu_seqlens
    with torch.no_grad(), LastArguments() as op:
        assert not policy_loss(*args).loss.requires_grad
    assert op.found is False
    assert policy_loss(*args).loss.requires_grad and not policy_loss(*args).kl.requires_grad
    assert torch.ops.spiral_kernels.policy_loss(*op_arguments(Batch([3]), with_gradient=False))[1].numel() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": torch.zeros(4, 1)}, r"logp must be \(T,\)"),
        ({"logp": torch.zeros(4, dtype=torch.bfloat16)}, "logp must be float32 or float64"),
        ({"rollout_logp": torch.zeros(3)}, r"rollout_logp must be \(4,\) real numbers, got \(3,\)"),
        ({"advantages": torch.zeros(3)}, r"advantages must be \(2,\)"),
        ({"ref_logp": torch.zeros(4, device="meta")}, "ref_logp is on meta"),
        ({"old_logp": torch.zeros(4, requires_grad=True)}, "old_logp carries no gradient; detach it"),
        ({"cu_seqlens": torch.tensor([0, 1, 3])}, "cu_seqlens ends at 3, but there are 4 tokens"),
        ({"cu_seqlens": torch.tensor([0, 5, 4])}, "cu_seqlens must start at 0 and never fall"),
        ({"cu_seqlens": torch.tensor([1, 1, 4])}, "cu_seqlens must start at 0"),
        ({"cu_seqlens": torch.tensor([0.0, 1, 4])}, r"cu_seqlens must be \(S \+ 1,\) int32 or int64"),
        ({"loss": "ppo"}, "no loss 'ppo'; there are: importance_sampling, ppo_clip"),
        ({"loss": "ppo_clip"}, r"'ppo_clip' needs clip=\(low, high\)"),
        ({"loss": "ppo_clip", "clip": (None, None)}, "needs clip"),
        ({"loss": "ppo_clip", "clip": (1.2, 0.2)}, r"low must lie in 0 \.\. 1"),
        ({"loss": "ppo_clip", "clip": (0.2, -0.2)}, "high must be >= 0"),
        ({"clip": (0.2, 0.2)}, "'importance_sampling' clips nothing"),
        ({"loss": "cispo", "clip": (0.2, 0.2), "dual_clip": 3.0}, "dual_clip belongs to ppo_clip and gspo"),
        ({"loss": "gspo", "clip": (0.2, 0.2), "dual_clip": 1.0}, "dual_clip must be a number > 1, got 1.0"),
        ({"kl": "k4"}, "no estimator kl='k4'; there are: k1, k2, k3"),
        ({"kl_coef": 0.1}, "kl_coef is not 0: pass ref_logp"),
        ({"tis_cap": 2.0}, "tis_cap .* is 1 without old_logp"),
        ({"tis_cap": 0.0, "old_logp": torch.zeros(4)}, "tis_cap must be a number > 0, got 0.0"),
        ({"token_mask": (0.5, 2)}, "token_mask looks at old_logp - rollout_logp"),
        ({"sequence_mask": (2, 0.5), "old_logp": torch.zeros(4)}, "sequence_mask must be"),
        ({"sequence_mask": (0.5,), "old_logp": torch.zeros(4)}, r"sequence_mask must be \(low, high\), got \(0.5,\)"),
        ({"off_policy_mask": math.nan}, "off_policy_mask must be a finite number, got nan"),
        ({"kl_coef": math.nan, "ref_logp": torch.zeros(4)}, "kl_coef must be a finite number, got nan"),
        ({"loss": "gspo", "clip": 0.2}, r"clip must be \(low, high\), got 0.2"),
        ({"loss": "gspo", "clip": (0.2, 0.2, 0.2)}, r"clip must be \(low, high\)"),
        ({"loss": "gspo", "clip": (True, 0.2)}, "clip: low must be a finite number, got True"),
        ({"logp": [0.0] * 4}, "logp must be a dense tensor, got list"),
        ({"cu_seqlens": [0, 1, 4]}, "cu_seqlens must be a dense tensor, got list"),
        ({"advantages": torch.zeros(2, dtype=torch.complex64)}, r"advantages must be \(2,\) real numbers"),
        ({"token_weight": torch.zeros(4, dtype=torch.complex64)}, r"token_weight must be \(4,\) real numbers"),
    ],
)
def test_bad_input_is_one_clear_line(backend, change, message):
    inputs = {
        "logp": torch.zeros(4),
        "rollout_logp": torch.zeros(4),
        "advantages": torch.zeros(2),
        "cu_seqlens": torch.tensor([0, 1, 4]),
    }
    with pytest.raises(ValueError, match=f"^policy_loss: .*{message}") as error:
        policy_loss(**inputs | change)
    assert "\n" not in str(error.value)


def test_public_names():
    assert LOSSES == ("importance_sampling", "ppo_clip", "cispo", "reinforce", "gspo")
    assert PolicyLoss._fields == ("loss", "ratio_mean", "ratio_max", "clip_low", "clip_high", "masked", "kl")
    assert list(inspect.signature(policy_loss).parameters) == [
        *("logp", "rollout_logp", "advantages", "cu_seqlens", "old_logp", "ref_logp", "token_weight", "loss", "clip"),
        *("dual_clip", "tis_cap", "token_mask", "sequence_mask", "off_policy_mask", "kl_coef", "kl"),
    ]
    parameters = ["reduction", "cu_seqlens", "mask", "n_problems", "n_sequences", "max_length"]
    assert list(inspect.signature(token_weights).parameters) == parameters
    assert {"policy_loss", "PolicyLoss", "token_weights"} <= set(spiral_kernels.__all__)


REDUCTIONS = {
    "problem_mean": lambda n, counts: Fraction(1, 3),
    "token_mean": lambda n, counts: Fraction(1, sum(counts)),
    "sequence_mean": lambda n, counts: Fraction(1, n * sum(c > 0 for c in counts)),
    "sequence_sum": lambda n, counts: Fraction(1, sum(c > 0 for c in counts)),
    "dr_grpo": lambda n, counts: Fraction(1, 100 * sum(c > 0 for c in counts)),
}


@given(sequences=st.lists(st.lists(st.booleans(), max_size=6), max_size=6), reduction=st.sampled_from(list(REDUCTIONS)))
@settings(deadline=None)
def test_token_weights(sequences, reduction):
    needed = {"problem_mean": {"n_problems": 3}, "dr_grpo": {"max_length": 100}}.get(reduction, {})
    counts = [sum(sequence) for sequence in sequences]
    cu_seqlens = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    mask = torch.tensor([m for sequence in sequences for m in sequence], dtype=torch.bool)
    expected = [
        float(REDUCTIONS[reduction](n, counts)) if m else 0.0
        for n, sequence in zip(counts, sequences, strict=True)
        for m in sequence
    ]
    found = token_weights(reduction, cu_seqlens, mask, **needed)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)
    if mask.all():
        assert torch.equal(found, token_weights(reduction, cu_seqlens, **needed))


def test_token_weights_are_the_padded_formulas_of_verl_and_trl():
    losses = torch.tensor([[1.0, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    flat, cu_seqlens = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64), torch.tensor([0, 4, 6, 6])
    by_sequence = (losses * mask).sum(1)
    has_tokens = (mask.sum(1) > 0).double()

    def reduced(reduction, **numbers):
        return (token_weights(reduction, cu_seqlens, **numbers) * flat).sum()

    torch.testing.assert_close(reduced("token_mean"), (losses * mask).sum() / mask.sum())
    means = by_sequence / mask.sum(1).clamp(min=1)
    torch.testing.assert_close(reduced("sequence_mean"), (means * has_tokens).sum() / has_tokens.sum())  # verl
    torch.testing.assert_close(reduced("sequence_mean", n_sequences=3), means.mean())  # TRL grpo
    torch.testing.assert_close(reduced("sequence_sum"), by_sequence.sum() / has_tokens.sum())
    torch.testing.assert_close(reduced("dr_grpo", max_length=4, n_sequences=3), by_sequence.sum() / (3 * 4))  # TRL
    torch.testing.assert_close(reduced("dr_grpo", max_length=4, n_sequences=1), by_sequence.sum() / 4)  # verl, older
    torch.testing.assert_close(reduced("dr_grpo", max_length=4), by_sequence.sum() / has_tokens.sum() / 4)  # verl


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "mean"}, "no reduction 'mean'; there are: problem_mean"),
        ({"reduction": "problem_mean"}, "problem_mean needs n_problems"),
        ({"reduction": "dr_grpo"}, "dr_grpo needs max_length"),
        ({"reduction": "dr_grpo", "max_length": 0}, "max_length must be a whole number >= 1, got 0"),
        ({"n_sequences": math.nan}, "n_sequences must be a whole number >= 1, got nan"),
        ({"n_sequences": True}, "n_sequences must be a whole number >= 1, got True"),
        ({"mask": [True] * 4}, "mask must be a dense tensor, got list"),
        ({"mask": torch.ones(4, dtype=torch.bool, device="meta")}, r"mask must be \(T,\) bool on cpu"),
        ({"cu_seqlens": [0, 4]}, "cu_seqlens must be a dense tensor, got list"),
        ({"mask": torch.ones(4)}, r"mask must be \(T,\) bool"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "cu_seqlens ends at 4, but there are 3 tokens"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "must start at 0"),
    ],
)
def test_token_weights_bad_input(arguments, message):
    with pytest.raises(ValueError, match=f"token_weights: .*{message}"):
        token_weights(**{"reduction": "token_mean", "cu_seqlens": torch.tensor([0, 4])} | arguments)

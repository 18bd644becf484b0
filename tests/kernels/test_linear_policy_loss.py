"""linear_policy_loss against full logits in float64 and a loop over rows, values and gradients, for every backend."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import spiral_kernels
from spiral_kernels import available_backends, force_backend, linear_logprob, policy_loss
from spiral_kernels.linear_logprob import tiles
from spiral_kernels.linear_logprob.head import head_of
from spiral_kernels.linear_policy_loss import LinearPolicyLoss, chunks, linear_policy_loss

BACKENDS = [name for name, why_not in available_backends("linear_policy_loss").items() if why_not is None]
FAST = [name for name in BACKENDS if name != "reference"]
INF = math.inf

# Every loss, on its own and with all that can come with it; `old`: is a proximal policy given.
SETTINGS = [
    {},
    {"old": True, "tis_cap": 1.1},
    {"old": True, "tis_cap": 1.1, "token_mask": (0.9, 1.2), "kl_coef": 0.2},
    {"loss": "reinforce", "kl_coef": 0.3, "kl": "k2"},
    {"loss": "reinforce", "old": True, "entropy_coef": 0.2},
    {"loss": "ppo_clip", "clip": (0.2, 0.28), "entropy_coef": -0.1},
    {"loss": "ppo_clip", "clip": (None, 0.1), "temperature": 0.7},
    {"loss": "ppo_clip", "clip": (0.1, 0.3), "dual_clip": 1.4, "old": True, "tis_cap": 1.2, "kl_coef": 0.1, "kl": "k3"},
    {"loss": "cispo", "clip": (None, 0.2), "kl_coef": 0.3, "kl": "k1"},
    {"loss": "cispo", "clip": (0.3, 0.2), "old": True, "tis_cap": 0.9, "temperature": 1.3},
    {
        **{"loss": "ppo_clip", "clip": (0.2, 0.2), "dual_clip": 2.0, "old": True, "tis_cap": 1.5},
        **{"kl_coef": 0.2, "entropy_coef": 0.1, "temperature": "each"},
    },
]


@pytest.fixture(params=BACKENDS)
def backend(request):
    force_backend(request.param, "linear_policy_loss")
    yield request.param
    force_backend(None, "linear_policy_loss")


@pytest.fixture
def small_tiles(monkeypatch):
    """Several chunks of rows and several tiles a chunk, the last ones ragged."""
    monkeypatch.setitem(tiles.CHUNK_BYTES, "cpu", 7 * 127 * 4)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 7 * 50)


class Case:
    """Inputs of a call, and the truth: full logits in float64, every row's loss from its formula, autograd."""

    def __init__(
        self,
        vocabulary=127,
        *,
        rows=30,
        size=16,
        dtype=torch.float32,
        seed=0,
        row_index=None,
        n_hidden=None,
        with_bias=False,
        soft_cap=None,
    ):
        self.generator = generator = torch.Generator().manual_seed(seed)
        n_hidden = rows if n_hidden is None else n_hidden
        self.hidden = torch.randn(n_hidden, size, generator=generator).to(dtype)
        self.weight = (torch.randn(vocabulary, size, generator=generator) * 0.5).to(dtype)
        self.targets = torch.randint(vocabulary, (rows,), generator=generator)
        self.row_index = row_index
        self.bias = torch.randn(vocabulary, generator=generator) if with_bias else None
        self.soft_cap = soft_cap
        self.advantages = torch.randn(rows, generator=generator)
        self.advantages[torch.rand(rows, generator=generator) < 0.15] = 0
        self.token_weight = torch.rand(rows, generator=generator)
        self.token_weight[torch.rand(rows, generator=generator) < 0.15] = 0
        self.each_temperature = torch.linspace(0.5, 2, rows)
        self.surround()

    def surround(self):
        """Log-probs of the other policies near this one's."""
        logp = self.logits(self.hidden.double(), self.weight.double()).log_softmax(1)
        logp = logp.gather(1, self.targets[:, None])[:, 0]
        near = [logp + 0.3 * torch.randn(len(logp), generator=self.generator) for _ in range(3)]
        self.rollout, self.old, self.ref = (x.float() for x in near)

    def logits(self, hidden, weight):
        logits = (hidden if self.row_index is None else hidden[self.row_index]) @ weight.t()
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def run(self, *, old=False, temperature=1.0, frozen=False, **settings):
        """The result and the gradients by hidden and weight; a frozen weight's are formed in another way."""
        hidden, weight = (x.detach().clone().requires_grad_() for x in (self.hidden, self.weight))
        weight.requires_grad_(not frozen)
        out = linear_policy_loss(
            *(hidden, weight, self.targets, self.advantages, self.rollout, self.token_weight),
            row_index=self.row_index,
            old_logp=self.old if old else None,
            ref_logp=self.ref,
            bias=self.bias,
            soft_cap=self.soft_cap,
            temperature=self.each_temperature if temperature == "each" else temperature,
            **settings,
        )
        return out, torch.autograd.grad(out.loss, (hidden,) if frozen else (hidden, weight))

    def truth(
        self,
        dtype=torch.float64,
        *,
        old=False,
        temperature=1.0,
        loss="importance_sampling",
        clip=(None, None),
        dual_clip=None,
        tis_cap=INF,
        token_mask=(0, INF),
        kl_coef=0.0,
        kl="k3",
        entropy_coef=0.0,
    ):
        """GEMMs in `dtype`, float64 for the truth itself. Returns loss, logp, entropy and the two gradients."""
        low, high = -INF if clip[0] is None else 1 - clip[0], INF if clip[1] is None else 1 + clip[1]
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight))
        logits = self.logits(hidden, weight).to(torch.promote_types(dtype, torch.float32))
        log_p = (logits / (self.each_temperature[:, None] if temperature == "each" else temperature)).log_softmax(1)
        entropy = torch.special.entr(log_p.exp()).sum(1)
        logp = log_p.gather(1, self.targets[:, None])[:, 0]
        total = 0.0 * logp[:0].sum()
        for r in range(len(logp)):
            if self.token_weight[r] == 0:
                continue
            A, lp, mu = self.advantages[r].double(), logp[r].double(), self.rollout[r].double()
            proximal = self.old[r].double() if old else mu
            w, ratio = (proximal - mu).exp(), (lp - proximal).exp()
            w = w.clamp(max=tis_cap) if token_mask[0] <= w <= token_mask[1] else 0.0
            if loss == "importance_sampling":
                surrogate = -ratio * A
            elif loss == "reinforce":
                surrogate = -lp * A
            elif loss == "cispo":
                surrogate = -ratio.detach().clamp(low, high) * A * lp
            else:
                surrogate = -torch.minimum(ratio * A, ratio.clamp(low, high) * A)
                if A < 0 and dual_clip is not None:
                    surrogate = torch.minimum(surrogate, -dual_clip * A)
            d = lp - self.ref[r].double()
            kl_term = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kl]
            total = total + self.token_weight[r].double() * (
                w * surrogate + kl_coef * kl_term - entropy_coef * entropy[r].double()
            )
        return total, logp, entropy, torch.autograd.grad(total, (hidden, weight))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def check(case, *, absolute=1e-5, gradient=1e-5, **settings):
    total, logp, entropy, truths = case.truth(**settings)
    counts = case.token_weight != 0
    for frozen in (True, False):
        out, gradients = case.run(frozen=frozen, **settings)
        assert (out.logp <= 0).all() and (out.entropy >= 0).all()
        assert (out.entropy <= math.log(case.weight.shape[0]) + absolute).all()
        torch.testing.assert_close(out.loss.double(), total, rtol=absolute, atol=absolute)
        for found, true in ((out.logp, logp), (out.entropy, entropy)):
            torch.testing.assert_close(found.double(), torch.where(counts, true, 0), rtol=0, atol=absolute)
        for found, true, like in zip(gradients, truths, (case.hidden, case.weight), strict=False):
            assert relative(found, true) <= gradient
            assert found.dtype == like.dtype and found.shape == like.shape
    return out, gradients


@pytest.mark.parametrize("of_loss", SETTINGS, ids=str)
def test_float32(backend, small_tiles, of_loss):
    check(Case(), **of_loss)


@pytest.mark.parametrize("of_loss", SETTINGS, ids=str)
def test_repeated_rows_add_up(backend, small_tiles, of_loss):
    """A prefix's last token predicts one token per child: its hidden row serves several rows."""
    row_index = torch.tensor([3, 3, 3, 0, 11, 3, 5, 5, 3, 3, 0, 7])
    _, (d_hidden, _) = check(Case(rows=12, n_hidden=12, row_index=row_index, seed=3), **of_loss)
    assert (d_hidden[[1, 2, 4, 6, 8, 9, 10]] == 0).all()


@pytest.mark.parametrize("of_loss", SETTINGS, ids=str)
@pytest.mark.parametrize("name", [b for b in BACKENDS if b in ("torch", "reference")])
def test_float64(name, small_tiles, of_loss):
    force_backend(name, "linear_policy_loss")
    try:
        check(Case(dtype=torch.float64), absolute=1e-12, gradient=1e-12, **of_loss)
    finally:
        force_backend(None, "linear_policy_loss")


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 32000, 151936, 151937])
def test_vocabularies(backend, vocabulary):
    case = Case(vocabulary)
    case.targets[:5] = vocabulary - 1  # the last column
    case.surround()
    for of_loss in (SETTINGS[0], SETTINGS[-1]):
        check(case, **of_loss)


HEADS = [(True, None), (False, 3.0), (True, 3.0)]  # with a bias?, soft cap


@pytest.mark.parametrize("of_loss", [SETTINGS[0], SETTINGS[5], SETTINGS[-1]], ids=str)
@pytest.mark.parametrize(("with_bias", "soft_cap"), HEADS)
def test_bias_and_soft_cap(backend, small_tiles, with_bias, soft_cap, of_loss):
    check(Case(with_bias=with_bias, soft_cap=soft_cap), **of_loss)


@pytest.mark.parametrize("of_loss", [SETTINGS[0], SETTINGS[5], SETTINGS[-1]], ids=str)
@pytest.mark.parametrize(("with_bias", "soft_cap"), HEADS)
def test_bias_and_soft_cap_in_bfloat16(backend, small_tiles, with_bias, soft_cap, of_loss):
    check_bfloat16(Case(rows=64, size=64, dtype=torch.bfloat16, with_bias=with_bias, soft_cap=soft_cap), **of_loss)


@pytest.mark.parametrize("of_loss", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_classes_left_out_by_the_bias(backend, small_tiles, of_loss):
    """A bias of -inf: as if the class were not there, even where that fills whole tiles."""
    case = Case(with_bias=True)
    case.bias[:60] = -torch.inf
    case.targets = torch.arange(30) + 70
    case.surround()
    if backend == "reference" and of_loss.get("entropy_coef"):
        pytest.skip("autograd makes 0 * inf of the entropy of a class that is not there")
    without = Case()
    without.__dict__ |= case.__dict__ | {
        "weight": case.weight[60:],
        "bias": case.bias[60:],
        "targets": case.targets - 60,
    }
    total, _, _, (true_hidden, true_weight) = without.truth(**of_loss)
    for frozen in (True, False):
        out, (d_hidden, *d_weight) = case.run(frozen=frozen, **of_loss)
        torch.testing.assert_close(out.loss.double(), total, rtol=1e-5, atol=1e-5)
        assert relative(d_hidden, true_hidden) <= 1e-5
    assert (d_weight[0][:60] == 0).all() and relative(d_weight[0][60:], true_weight) <= 1e-5


@pytest.mark.parametrize("of_loss", [SETTINGS[0], SETTINGS[5], SETTINGS[-1]], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 127, 32000])
def test_bfloat16_is_no_worse_than_torch(backend, vocabulary, of_loss):
    check_bfloat16(Case(vocabulary, rows=64, size=64, dtype=torch.bfloat16), **of_loss)


def check_bfloat16(case, **of_loss):
    total, logp, _, truths = case.truth(**of_loss)
    own_total, own_logp, _, owns = case.truth(torch.bfloat16, **of_loss)
    counts = case.token_weight != 0
    for frozen in (True, False):
        out, gradients = case.run(frozen=frozen, **of_loss)
        assert out.loss.dtype == out.logp.dtype == torch.float32
        error, own_error = ((x.double() - logp)[counts].abs().max() for x in (out.logp, own_logp))
        assert error <= own_error + 1e-3
        assert (out.loss - total).abs() <= (own_total - total).abs() + 1e-3 * case.token_weight.sum()
        for found, own, true in zip(gradients, owns, truths, strict=False):
            assert relative(found, true) <= relative(own, true) + 1e-3
            assert found.dtype == torch.bfloat16


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 12),
    n_hidden=st.integers(1, 6),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 2000),
    tile=st.integers(1, 100),
    seed=st.integers(0, 1000),
    of_loss=st.sampled_from(SETTINGS),
    name=st.sampled_from(FAST),
)
def test_any_shape(rows, n_hidden, vocabulary, chunk, tile, seed, of_loss, name):
    row_index = torch.randint(n_hidden, (rows,), generator=torch.Generator().manual_seed(seed))
    case = Case(vocabulary, rows=rows, size=4, seed=seed, row_index=row_index, n_hidden=n_hidden)
    force_backend(name, "linear_policy_loss")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiles.CHUNK_BYTES, "cpu", chunk)
        patch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
        check(case, absolute=3e-5, gradient=3e-5, **of_loss)
    force_backend(None, "linear_policy_loss")


@pytest.mark.parametrize("of_loss", [s for s in SETTINGS if s.get("loss") != "cispo"], ids=str)
@pytest.mark.parametrize("name", ["torch", "reference"])
def test_gradcheck(monkeypatch, name, of_loss):
    """Finite differences, with ratios on either side of the clip."""
    monkeypatch.setitem(tiles.CHUNK_BYTES, "cpu", 2 * 7 * 8)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 6)
    row_index = torch.tensor([0, 0, 2, 1, 2])
    shape = {"rows": 5, "size": 4, "n_hidden": 3, "row_index": row_index}
    case = Case(7, **shape, dtype=torch.float64, seed=2, with_bias=True, soft_cap=2.0)
    of_loss = dict(of_loss) | {"bias": case.bias, "soft_cap": case.soft_cap}
    old = case.old if of_loss.pop("old", False) else None
    if of_loss.get("temperature") == "each":
        of_loss["temperature"] = case.each_temperature

    def total(hidden, weight):
        rows = case.targets, case.advantages, case.rollout, case.token_weight
        return linear_policy_loss(
            hidden, weight, *rows, row_index=row_index, old_logp=old, ref_logp=case.ref, **of_loss
        ).loss

    force_backend(name, "linear_policy_loss")
    assert torch.autograd.gradcheck(total, (case.hidden.requires_grad_(), case.weight))
    assert torch.autograd.gradcheck(total, (case.hidden, case.weight.requires_grad_()))
    force_backend(None, "linear_policy_loss")


@pytest.mark.parametrize("of_loss", SETTINGS, ids=str)
def test_equals_linear_logprob_and_policy_loss(backend, small_tiles, of_loss):
    case, of_loss = Case(), dict(of_loss)
    out, gradients = case.run(**of_loss)
    temperature = of_loss.pop("temperature", 1.0)
    temperature = case.each_temperature if temperature == "each" else temperature
    entropy_coef = of_loss.pop("entropy_coef", 0.0)
    old = case.old if of_loss.pop("old", False) else None
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    logp = linear_logprob(hidden, weight, case.targets, temperature=temperature).logp
    others = {"old_logp": old, "ref_logp": case.ref, "token_weight": case.token_weight}
    two = policy_loss(logp, case.rollout, case.advantages, torch.arange(31), **others, **of_loss)
    for name in ("ratio_mean", "ratio_max", "clip_low", "clip_high", "kl"):
        torch.testing.assert_close(getattr(out, name), getattr(two, name), rtol=1e-5, atol=1e-6)
    if entropy_coef == 0:
        torch.testing.assert_close(out.loss, two.loss, rtol=1e-5, atol=1e-5)
        for found, other in zip(gradients, torch.autograd.grad(two.loss, (hidden, weight)), strict=True):
            assert relative(found, other) < 1e-5


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("of_loss", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_rows_of_weight_0_are_never_read(backend, small_tiles, of_loss, with_index, frozen):
    case = Case(row_index=torch.randperm(30) if with_index else None)
    case.token_weight[20:] = 0
    _, clean = case.run(frozen=frozen, **of_loss)
    unread = case.token_weight == 0
    for x in (case.advantages, case.rollout, case.old, case.ref):
        x[unread] = torch.nan
    rows = torch.arange(30)[unread] if case.row_index is None else case.row_index[unread]
    case.hidden[rows] = torch.nan
    out, gradients = case.run(frozen=frozen, **of_loss)
    assert out.loss.isfinite() and (out.logp[unread] == 0).all() and (out.entropy[unread] == 0).all()
    assert (gradients[0][rows] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(gradients, clean, strict=True))


def test_the_loss_is_summed_in_float64(backend):
    case = Case(rows=3, size=1, n_hidden=1, row_index=torch.zeros(3, dtype=torch.int64))
    case.targets[:], case.advantages[:] = 5, -1
    case.token_weight = torch.tensor([1e8, 1, -1e8])
    out, _ = case.run(loss="reinforce")
    torch.testing.assert_close(out.loss, out.logp[0])


def test_a_weight_on_the_bound_of_the_mask_is_kept(backend):
    case = Case()
    case.old = case.rollout
    plain, masked = case.run(old=True)[0], case.run(old=True, token_mask=(1, 1))[0]
    assert masked.loss == plain.loss and masked.ratio_mean == plain.ratio_mean


def test_credit_0_has_no_surrogate(backend, small_tiles):
    case = Case()
    case.advantages[:] = 0
    case.rollout[3], case.old[4] = torch.nan, torch.inf
    out, gradients = case.run(old=True, loss="ppo_clip", clip=(0.2, 0.2))
    assert out.loss == 0 and all((g == 0).all() for g in gradients)
    case.surround()
    check(case, kl_coef=0.3, entropy_coef=0.1)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(backend, rows):
    out, _ = check(Case(rows=rows, n_hidden=4, row_index=torch.zeros(rows, dtype=torch.int64)), **SETTINGS[-1])
    assert out.logp.shape == (rows,)
    case = Case(rows=3)
    case.token_weight[:] = 0
    out, gradients = case.run(**SETTINGS[-1])
    assert out.loss == 0 and out.ratio_mean == 1 and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAST)  # float64 itself loses 1 - p at 40
def test_gradient_survives_p_near_one(name, dtype, trained, gap):
    force_backend(name, "linear_policy_loss")
    weight = torch.tensor([[gap, 1.0], [0.0, 2.0], [0.0, -0.5]], dtype=dtype)
    hidden = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    one = torch.ones(1)
    rows = torch.tensor([0]), -one, 0 * one, one
    linear_policy_loss(hidden, weight.requires_grad_(trained), *rows, loss="reinforce").loss.backward()
    weight = weight.detach()
    force_backend(None, "linear_policy_loss")
    other = torch.tensor(-gap).double().exp()
    other = other / (1 + 2 * other)
    d_hidden = torch.stack([2 * other, -other, -other]) @ weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(hidden.grad[0].double(), d_hidden, rtol=tolerance, atol=0)


def test_minus_infinity_columns(backend, small_tiles):
    """A column of -inf has probability 0 and touches nothing else, even where it fills whole tiles."""
    case = Case()
    case.hidden[:, 0] = 1
    case.weight[:60, 0] = -torch.inf
    case.targets = torch.arange(30) + 70
    case.surround()
    for of_loss in ({}, {"entropy_coef": 0.3}) if backend != "reference" else ({},):
        out, (d_hidden, d_weight) = case.run(**of_loss)
        finite = Case()
        finite.__dict__ |= case.__dict__ | {"weight": case.weight[60:], "targets": case.targets - 60}
        total, logp, _, (true_hidden, true_weight) = finite.truth(**of_loss)
        torch.testing.assert_close(out.loss.double(), total, rtol=1e-5, atol=1e-5)
        assert relative(d_hidden[:, 1:], true_hidden[:, 1:]) <= 1e-5
        assert (d_weight[:60] == 0).all() and relative(d_weight[60:], true_weight) <= 1e-5


def test_common_offset(backend, small_tiles):
    """Logits of 1e4 + k/64 are exact in float32, so the offset must cancel."""
    case = Case(rows=20)
    case.weight = torch.randint(-64, 65, (127, 3), generator=case.generator) / 64
    case.weight[:, 0] = 1e4
    case.hidden = torch.cat([torch.ones(20, 1), torch.randint(-3, 4, (20, 2), generator=case.generator)], 1)
    case.surround()
    for of_loss in ({}, {"entropy_coef": 0.3}):
        total, _, _, (true_hidden, true_weight) = case.truth(**of_loss)
        for frozen in (True, False):
            out, (d_hidden, *d_weight) = case.run(frozen=frozen, **of_loss)
            torch.testing.assert_close(out.loss.double(), total, rtol=1e-5, atol=1e-5)
            assert relative(d_hidden[:, 1:], true_hidden[:, 1:]) <= 1e-5
        assert relative(*d_weight, true_weight) <= 1e-5


def test_a_ratio_that_overflows_on_its_clipped_side(backend):
    case = Case(rows=4)
    case.rollout = case.rollout - 800
    case.advantages, case.token_weight = torch.ones(4), torch.ones(4)
    out, gradients = case.run(loss="ppo_clip", clip=(0.2, 0.25))
    assert out.loss == -5 and out.clip_high == 1
    assert backend == "reference" or all((g == 0).all() for g in gradients)  # autograd makes it inf * 0


def test_nan_is_not_hidden(backend):
    for name in ("hidden", "advantages", "rollout", "old", "token_weight"):
        case = Case(rows=2)
        case.advantages, case.token_weight = torch.ones(2), torch.ones(2)
        getattr(case, name).view(-1)[0] = torch.nan
        for of_loss in SETTINGS:
            if of_loss.get("old") and "token_mask" not in of_loss:  # a row outside the mask has no surrogate
                assert case.run(**of_loss)[0].loss.isnan(), name


def test_inputs_that_are_not_contiguous(backend, small_tiles):
    case = Case(row_index=torch.arange(30))
    for name in ("targets", "advantages", "rollout", "old", "ref", "token_weight", "each_temperature", "row_index"):
        setattr(case, name, torch.stack([getattr(case, name)] * 2, 1)[:, 0])
    case.hidden = torch.cat([case.hidden, case.hidden], 1)[:, ::2]
    case.weight = case.weight.t().contiguous().t()
    case.surround()
    assert not any(x.is_contiguous() for x in (case.hidden, case.weight, case.targets, case.token_weight))
    check(case, **SETTINGS[-1])


def test_does_not_depend_on_the_split_into_calls(backend, small_tiles):
    case = Case(n_hidden=10, row_index=torch.arange(30) % 10)
    out, gradients = case.run(**SETTINGS[-1])
    total, sums = 0, [0, 0]
    for part in (slice(0, 11), slice(11, 12), slice(12, 30)):
        row_index = case.row_index[part]
        one = Case(rows=len(row_index), n_hidden=10, row_index=row_index)
        one.hidden, one.weight = case.hidden, case.weight
        for name in ("targets", "advantages", "rollout", "old", "ref", "token_weight", "each_temperature"):
            setattr(one, name, getattr(case, name)[part])
        of_part, gradients_of_part = one.run(**SETTINGS[-1])
        total, sums = total + of_part.loss, [a + b for a, b in zip(sums, gradients_of_part, strict=True)]
    torch.testing.assert_close(total, out.loss, rtol=1e-5, atol=1e-6)
    for found, whole in zip(sums, gradients, strict=True):
        assert relative(found, whole) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_more_than_two_to_the_31_logits(name):
    """Rows near the end of R x V > 2^31 give the same numbers as alone."""
    rows, vocabulary = 140_000, 16_000
    force_backend(name, "linear_policy_loss")
    few = Case(vocabulary, rows=4, size=1)
    few.token_weight[:] = 1
    many = Case(7, rows=4, size=1, n_hidden=4)
    many.hidden, many.weight = few.hidden, few.weight
    many.row_index = torch.zeros(rows, dtype=torch.int64)
    many.row_index[-4:] = torch.arange(4)
    for of_rows in ("targets", "advantages", "rollout", "old", "ref"):
        ending = getattr(few, of_rows)
        setattr(many, of_rows, torch.cat([ending.new_zeros(rows - 4), ending]))
    many.token_weight = torch.ones(rows)
    found, gradients = many.run()
    alone, truths = few.run()
    force_backend(None, "linear_policy_loss")
    torch.testing.assert_close(found.logp[-4:], alone.logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients[0], truths[0], rtol=1e-5, atol=1e-6)  # credit 0 adds nothing


@pytest.mark.parametrize("of_loss", [SETTINGS[0], SETTINGS[-1]], ids=str)
@pytest.mark.parametrize("frozen", [True, False])
def test_two_runs_are_bit_equal(backend, small_tiles, frozen, of_loss):
    case = Case(n_hidden=10, row_index=torch.arange(30) % 10)
    first, second = case.run(frozen=frozen, **of_loss), case.run(frozen=frozen, **of_loss)
    assert all(torch.equal(a, b) for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))


def test_loss_scales_the_gradient_and_is_left_alone(backend):
    """Two backwards through one graph, each scaled: the stored gradient is not consumed."""
    case = Case()
    hidden = case.hidden.requires_grad_()
    loss = linear_policy_loss(hidden, case.weight, case.targets, case.advantages, case.rollout, case.token_weight).loss
    (one,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (three,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(three, 3 * one)


def op_arguments(case, name, entropy_coef):
    rows = case.advantages, case.rollout, case.token_weight, case.old, case.ref
    scale = torch.ones(len(case.targets))
    flags = case.hidden.requires_grad, case.weight.requires_grad
    tensors = case.hidden, case.weight, case.bias, case.targets, case.row_index, scale, *rows
    return *tensors, "ppo_clip", 0.8, 1.2, 2.0, 1.5, 0.1, "k3", 0.5, 2.0, case.soft_cap, entropy_coef, *flags, name


@pytest.mark.parametrize("with_row_index", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_opcheck(name, with_row_index):
    case = Case(11, rows=4, row_index=torch.tensor([0, 1, 1, 3]) if with_row_index else None)
    case.hidden.requires_grad_()
    op = torch.ops.spiral_kernels.linear_policy_loss.default
    torch.library.opcheck(op, op_arguments(case, name, 0.0))
    case.bias, case.soft_cap = torch.randn(11), 2.0
    torch.library.opcheck(op, op_arguments(case, name, 0.1))
    case.weight.requires_grad_()
    torch.library.opcheck(op, op_arguments(case, name, 0.1))


def test_compiles():
    case = Case()
    rows = case.targets, case.advantages, case.rollout, case.token_weight

    def total(hidden):
        return linear_policy_loss(hidden * 1.5, case.weight, *rows, loss="ppo_clip", clip=(0.2, 0.3)).loss

    hidden = case.hidden.requires_grad_()
    (found,) = torch.autograd.grad(torch.compile(total, fullgraph=True, backend="aot_eager")(hidden), hidden)
    torch.testing.assert_close(found, *torch.autograd.grad(total(hidden), hidden))
    torch.compiler.reset()  # or its cache keeps tensors with their graphs


class NewStorages(TorchDispatchMode):
    """The sizes in bytes of all storages that operations allocate."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.sizes.append(x.untyped_storage().nbytes())
        return result


def allocations(case, entropy_coef, need_hidden, need_weight):
    rows = chunks.Rows(case.advantages, case.rollout, case.token_weight, None, None)
    at = chunks.Settings("reinforce", 0.0, INF, INF, INF, 0.0, "k3")
    head = head_of(case.weight, None, None)
    of_head = case.hidden, head, case.targets, None, torch.ones(8)
    with NewStorages() as storages:
        results = chunks.linear_policy_loss(
            "torch", *of_head, rows, at, (0.0, INF), entropy_coef, need_hidden, need_weight
        )
    return storages.sizes, results


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_nothing_is_formed_that_is_not_needed(monkeypatch, entropy_coef):
    """A frozen head's gradient is not allocated; without gradients there is one pass over the chunk, not two."""
    monkeypatch.setitem(tiles.CHUNK_BYTES, "cpu", 4 * 8 * 50_000)
    case = Case(50_000, rows=8, size=16)
    case.token_weight[:] = 1
    frozen, results = allocations(case, entropy_coef, True, False)
    gradient = 4 * case.weight.numel()
    inputs = [x for x in frozen if x == gradient]  # views of the weight itself
    assert len([x for x in allocations(case, entropy_coef, True, True)[0] if x == gradient]) > len(inputs)
    assert results[1].shape == case.hidden.shape and results[2].numel() == 0
    nothing, results = allocations(case, entropy_coef, False, False)
    assert len(nothing) < len(frozen) and results[1].numel() == results[2].numel() == 0


def test_only_the_loss_has_a_gradient_and_none_under_no_grad(backend):
    case = Case()
    args = case.hidden.requires_grad_(), case.weight, case.targets, case.advantages, case.rollout, case.token_weight
    out = linear_policy_loss(*args)
    assert out.loss.requires_grad and not any(x.requires_grad for x in out[1:])
    with torch.no_grad():
        assert not linear_policy_loss(*args).loss.requires_grad
    out.loss.backward()
    assert case.weight.grad is None and case.hidden.grad is not None


def test_autocast_does_not_lower_the_precision(backend):
    case = Case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(case)


MEMORY = """
import resource, sys, torch
import spiral_kernels
torch.set_num_threads(1)
spiral_kernels.force_backend(sys.argv[1], "linear_policy_loss")
def step(rows, vocabulary):
    hidden, weight = torch.randn(rows, 32, requires_grad=True), torch.randn(vocabulary, 32)
    targets, x = torch.randint(vocabulary, (rows,)), torch.randn(rows)
    spiral_kernels.linear_policy_loss(hidden, weight, targets, x, x, x, entropy_coef=0.1).loss.backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
step(64, 20_000)
before = peak()
for rows, vocabulary in (3072, 20_000), (768, 80_000):
    step(rows, vocabulary)
    print(peak() - before)
"""


@pytest.mark.parametrize("name", FAST)
def test_peak_memory_does_not_grow_with_rows_times_vocabulary(name):
    """Process memory beyond a call with 64 rows; the logits would be 246 MB."""
    run = subprocess.run([sys.executable, "-c", MEMORY, name], capture_output=True, text=True, check=True)
    for extra_mb in run.stdout.split():
        assert float(extra_mb) < 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, r"hidden must be \(N, H\)"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "one entry per row"),
        ({"advantages": torch.zeros(3)}, r"advantages must be \(4,\) real numbers, got \(3,\)"),
        ({"token_weight": torch.zeros(4, device="meta")}, "token_weight is on meta, the other tensors on cpu"),
        ({"ref_logp": torch.zeros(4, requires_grad=True)}, "ref_logp carries no gradient; detach it"),
        ({"bias": torch.zeros(5, requires_grad=True)}, "bias carries no gradient; detach it"),
        ({"soft_cap": -1.0}, "soft_cap must be a finite number > 0, got -1.0"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0"),
        ({"temperature": torch.tensor([1, -2.0, 1, 1])}, "temperature must be > 0 and finite, found -2.0"),
        ({"advantages": torch.zeros(4, dtype=torch.complex64)}, r"advantages must be \(4,\) real numbers"),
        ({"token_weight": None}, "token_weight must be a dense tensor, got NoneType"),
        ({"ref_logp": [0.0] * 4}, "ref_logp must be a dense tensor, got list"),
        ({"entropy_coef": math.nan}, "entropy_coef must be a finite number, got nan"),
        ({"kl_coef": math.inf, "ref_logp": torch.zeros(4)}, "kl_coef must be a finite number, got inf"),
        (
            {"token_mask": (0.5, 1, 2), "old_logp": torch.zeros(4)},
            r"token_mask must be \(low, high\), got \(0.5, 1, 2\)",
        ),
        ({"loss": "gspo", "clip": (0.1, 0.1)}, "no loss 'gspo'; there are: importance_sampling, ppo_clip, cispo"),
        ({"loss": "ppo_clip"}, "needs clip"),
        ({"kl_coef": 0.1}, "pass ref_logp"),
        ({"tis_cap": 2.0}, "tis_cap"),
        ({"token_mask": (0.5, 2)}, "token_mask looks at old_logp - rollout_logp: pass old_logp"),
        ({"token_mask": (2, 0.5), "old_logp": torch.zeros(4)}, r"token_mask must be \(low, high\)"),
    ],
)
def test_bad_input_is_one_clear_line(backend, change, message):
    inputs = {"hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "targets": torch.zeros(4, dtype=torch.int64)}
    inputs |= {name: torch.zeros(4) for name in ("advantages", "rollout_logp", "token_weight")}
    with pytest.raises(ValueError, match=f"linear_policy_loss: .*{message}") as error:
        linear_policy_loss(**inputs | change)
    assert "\n" not in str(error.value)


def test_index_out_of_range(backend):
    for bad in (-1, 127):
        case = Case(rows=2)
        case.targets[1] = bad
        with pytest.raises(IndexError, match=rf"linear_policy_loss: targets must lie in 0 \.\. 126, found {bad}"):
            case.run()
    for bad in (-1, 2):
        case = Case(rows=2)
        case.row_index = torch.tensor([0, bad])
        with pytest.raises(IndexError, match=rf"row_index must lie in 0 \.\. 1, found {bad}"):
            case.run()


@pytest.mark.parametrize("trained", [False, True])
def test_the_gradient_has_no_gradient(backend, trained):
    """Autograd would take the stored gradient for constant; only the reference is differentiable twice."""
    for linear in (True, False):
        case = Case(rows=4)
        hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_(trained)
        loss = linear_policy_loss(hidden, weight, case.targets, case.advantages, case.rollout, case.token_weight).loss
        (d_hidden,) = torch.autograd.grad(loss if linear else loss.square(), hidden, create_graph=True)
        penalty = d_hidden.square().sum()
        if backend == "reference":
            penalty.backward()
        else:
            message = "linear_policy_loss: its gradient has no gradient of its own"
            with pytest.raises(RuntimeError, match=message):
                torch.autograd.grad(penalty + hidden.sum(), hidden, retain_graph=True)
            with pytest.raises(RuntimeError, match=message):
                penalty.backward()


def test_public_names():
    assert LinearPolicyLoss._fields == (
        *("loss", "logp", "entropy", "ratio_mean", "ratio_max", "clip_low", "clip_high", "kl"),
    )
    assert list(inspect.signature(linear_policy_loss).parameters) == [
        *("hidden", "weight", "targets", "advantages", "rollout_logp", "token_weight", "row_index", "old_logp"),
        *("ref_logp", "kl_coef", "kl", "loss", "clip", "dual_clip", "tis_cap", "token_mask", "bias", "soft_cap"),
        *("temperature", "entropy_coef"),
    ]
    assert {"LinearPolicyLoss", "linear_policy_loss"} <= set(spiral_kernels.__all__)

"""linear_logprob against the float64 reference, values and gradients, for every backend and awkward input."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spiral_kernels
from spiral_kernels.linear_logprob import linear_logprob, tiled, tiles, torch_rows
from spiral_kernels.linear_logprob.head import head_of

BACKENDS = [name for name, reason in spiral_kernels.available_backends("linear_logprob").items() if reason is None]
FAST = [name for name in BACKENDS if name != "reference"]
FLOAT64_BACKENDS = [
    name
    for name, reason in spiral_kernels.available_backends("linear_logprob", dtype=torch.float64).items()
    if reason is None
]


@pytest.fixture(params=BACKENDS)
def backend(request):
    spiral_kernels.force_backend(request.param, "linear_logprob")
    yield request.param
    spiral_kernels.force_backend(None, "linear_logprob")


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in both directions, the last ones ragged."""
    monkeypatch.setitem(tiles.TILE_ROWS, "cpu", 7)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 7 * 50)


class Case:
    """Inputs of a call, its results and gradients, and the truth for them."""

    def __init__(self, hidden, weight, targets, row_index=None, temperature=1.0, bias=None, soft_cap=None):
        self.inputs = hidden, weight, targets, row_index, temperature
        self.bias, self.soft_cap = bias, soft_cap
        self.d_logp = torch.linspace(-1, 1.5, targets.shape[0], dtype=torch.float64, device=targets.device)

    def run(self, frozen=False):
        """A frozen weight's d_hidden is formed in the forward, a trained one's in the backward."""
        hidden, weight = (x.detach().clone().requires_grad_() for x in self.inputs[:2])
        weight.requires_grad_(not frozen)
        _, _, targets, row_index, temperature = self.inputs
        of_head = {"row_index": row_index, "bias": self.bias, "soft_cap": self.soft_cap, "temperature": temperature}
        out = linear_logprob(hidden, weight, targets, **of_head, return_entropy=True)
        return self._with_gradients(out.logp, out.lse, out.entropy, hidden, weight)

    def truth(self, dtype=torch.float64):
        """Plain torch with GEMMs in `dtype`, float64 for the truth itself; softmax in at least float32."""
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in self.inputs[:2])
        _, _, targets, row_index, temperature = self.inputs
        rows = hidden if row_index is None else hidden[row_index]
        logits = rows @ weight.t()
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        if self.bias is not None:
            logits = logits + self.bias
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[:, None]
        log_p = (logits / temperature).log_softmax(1)
        lse = (logits / temperature).logsumexp(1)
        entropy = torch.special.entr(log_p.exp()).sum(1)
        return self._with_gradients(log_p.gather(1, targets[:, None])[:, 0], lse, entropy, hidden, weight)

    def _with_gradients(self, logp, lse, entropy, hidden, weight):
        wanted = {name: x for name, x in (("d_hidden", hidden), ("d_weight", weight)) if x.requires_grad}
        gradients = torch.autograd.grad((logp.double() * self.d_logp).sum(), list(wanted.values()))
        return {"logp": logp, "lse": lse, "entropy": entropy, **dict(zip(wanted, gradients, strict=True))}


def random_case(vocabulary, *, rows=30, size=16, dtype=torch.float32, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, size, generator=generator) * 0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    return Case(hidden, weight, targets, **kwargs)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def check(case, *, absolute=1e-5, gradient=1e-5):
    found, frozen, true = case.run(), case.run(frozen=True), case.truth()
    for of_run in (found, frozen):
        for name in ("logp", "lse", "entropy"):
            torch.testing.assert_close(of_run[name].double(), true[name], rtol=0, atol=absolute)
        assert (of_run["logp"] <= 0).all() and (of_run["entropy"] >= 0).all()
        assert (of_run["entropy"] <= math.log(case.inputs[1].shape[0]) + absolute).all()
        for name in ("d_hidden", "d_weight"):
            if name in of_run:
                assert relative(of_run[name], true[name]) <= gradient, name
                assert of_run[name].dtype == case.inputs[0].dtype
    return found


@pytest.mark.parametrize("vocabulary", [1, 5, 127, 32000, 151936, 151937])
def test_float32(backend, vocabulary):
    check(random_case(vocabulary))


def test_several_tiles(backend, small_tiles):
    check(random_case(127))
    check(random_case(50, rows=7))
    check(random_case(101, rows=8, row_index=torch.arange(8)))


@pytest.mark.skipif("native" not in BACKENDS, reason="the native module is not built")
@pytest.mark.parametrize("name", ["base", "avx2", "avx512"])
def test_every_instruction_set(name, small_tiles):
    from spiral_kernels import _native

    fastest = _native.instruction_set()
    try:
        _native.use_instruction_set(name)
    except ValueError:
        pytest.skip(f"no {name} here")
    spiral_kernels.force_backend("native", "linear_logprob")
    try:
        check(random_case(127))
        case = random_case(127, dtype=torch.bfloat16)
        found, own, true = case.run(), case.truth(torch.bfloat16), case.truth()
        assert relative(found["d_hidden"], true["d_hidden"]) <= relative(own["d_hidden"], true["d_hidden"]) + 1e-3
    finally:
        spiral_kernels.force_backend(None, "linear_logprob")
        _native.use_instruction_set(fastest)


def test_float64(small_tiles):
    for name in FLOAT64_BACKENDS:
        spiral_kernels.force_backend(name, "linear_logprob")
        try:
            check(random_case(127, dtype=torch.float64), absolute=1e-12, gradient=1e-12)
        finally:
            spiral_kernels.force_backend(None, "linear_logprob")


@pytest.mark.parametrize("vocabulary", [5, 127, 32000, 151937])
def test_bfloat16_is_no_worse_than_torch(backend, vocabulary):
    check_bfloat16(random_case(vocabulary, rows=64, size=64, dtype=torch.bfloat16))


def test_bfloat16_is_summed_in_float32(backend, monkeypatch):
    """Over many tiles."""
    monkeypatch.setitem(tiles.TILE_ROWS, "cpu", 16)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 16 * 5)
    check_bfloat16(random_case(1500, rows=40, size=64, dtype=torch.bfloat16))


def test_entropy_is_never_negative(backend):
    """Also where all probability lies in one class that is not the target: there it is a difference near 0."""
    case = random_case(17, rows=500, size=8)
    hidden, weight, targets = case.inputs[:3]
    out = linear_logprob(10 * hidden, weight, targets, return_entropy=True)
    assert (out.entropy >= 0).all() and (out.entropy < 1e-6).any()


HEADS = [(True, None), (False, 3.0), (True, 3.0), (True, 0.5)]  # with a bias?, soft cap; logits are of a few nats


@pytest.mark.parametrize(("with_bias", "soft_cap"), HEADS)
def test_bias_and_soft_cap(backend, small_tiles, with_bias, soft_cap):
    bias = torch.randn(127, generator=torch.Generator().manual_seed(1)) if with_bias else None
    check(random_case(127, bias=bias, soft_cap=soft_cap, temperature=torch.linspace(0.3, 3, 30)))


@pytest.mark.parametrize(("with_bias", "soft_cap"), HEADS)
def test_bias_and_soft_cap_in_bfloat16(backend, small_tiles, with_bias, soft_cap):
    bias = torch.randn(127, generator=torch.Generator().manual_seed(1)) if with_bias else None
    check_bfloat16(random_case(127, rows=64, size=64, dtype=torch.bfloat16, bias=bias, soft_cap=soft_cap))


@pytest.mark.parametrize(("with_bias", "soft_cap"), HEADS)
def test_bias_and_soft_cap_in_float64(small_tiles, with_bias, soft_cap):
    bias = torch.randn(127, generator=torch.Generator().manual_seed(1)).double() if with_bias else None
    for name in FLOAT64_BACKENDS:
        spiral_kernels.force_backend(name, "linear_logprob")
        case = random_case(127, dtype=torch.float64, bias=bias, soft_cap=soft_cap)
        check(case, absolute=1e-12, gradient=1e-12)
    spiral_kernels.force_backend(None, "linear_logprob")


def test_a_soft_cap_that_all_logits_reach(backend, small_tiles):
    """tanh is 1 in float32 from 9 on; its derivative is small there, but not noise."""
    case = random_case(127, size=3, soft_cap=1.0)
    hidden, weight = case.inputs[:2]
    hidden[:, 0], weight[:, 0] = 1, torch.linspace(4, 9, 127)
    hidden[:, 1:], weight[:, 1:] = 0.1 * hidden[:, 1:], 0.1 * weight[:, 1:]
    check(case)


def test_classes_left_out_by_the_bias(backend, small_tiles):
    """A bias of -inf: as if the class were not there, also where that fills whole tiles or leaves one class."""
    case = random_case(127, bias=torch.randn(127))
    case.bias[:60] = -torch.inf
    case.inputs[2].copy_(torch.arange(30) + 70)
    check(case)
    case.bias[:] = -torch.inf
    case.bias[99] = 0
    case.inputs[2].fill_(99)
    for frozen in (True, False):
        found = case.run(frozen)
        assert (found["logp"] == 0).all() and (found["entropy"] == 0).all() and (found["d_hidden"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_that_rise_by_hundreds_from_tile_to_tile(backend, small_tiles, dtype):
    """The sums' origin moves again and again, or only once where logits fall."""
    size = 150 if dtype == torch.float32 else 24
    for first, last in ((-size, size), (size, -size)):
        case = random_case(127, dtype=dtype)
        case.inputs[0][:, 0] = 1
        case.inputs[1][:, 0] = torch.linspace(first, last, 127)
        case.inputs[2].copy_(torch.linspace(0, 126, 30).long())
        if dtype == torch.float32:  # log-probs of -300, whose last digit is 3e-5
            check(case, absolute=1e-4, gradient=3e-5)
        else:
            check_bfloat16(case)


def check_bfloat16(case):
    found, frozen, own, true = case.run(), case.run(frozen=True), case.truth(torch.bfloat16), case.truth()
    for of_run in (found, frozen):
        assert of_run["logp"].dtype == torch.float32
        for name in ("logp", "lse", "entropy"):
            error = (of_run[name].double() - true[name]).abs().max()
            assert error <= (own[name].double() - true[name]).abs().max() + 1e-3, name
        for name in ("d_hidden", "d_weight"):
            if name in of_run:
                assert relative(of_run[name], true[name]) <= relative(own[name], true[name]) + 1e-3, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("name", ["triton", "torch", "reference"])
@pytest.mark.parametrize("vocabulary", [5, 127, 32000])
def test_on_cuda(name, vocabulary):
    spiral_kernels.force_backend(name, "linear_logprob")
    try:
        for dtype, check_case in ((torch.float32, check), (torch.bfloat16, check_bfloat16)):
            on_cpu = random_case(vocabulary, rows=64, size=64, dtype=dtype)
            check_case(Case(*(x.to("cuda") for x in on_cpu.inputs[:3])))
    finally:
        spiral_kernels.force_backend(None, "linear_logprob")


def test_target_in_the_last_and_first_column(backend, small_tiles):
    case = random_case(127)
    for column in (126, 0, 49, 50):
        case.inputs[2].fill_(column)
        check(case)


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAST)  # float64 itself loses 1 - p at 40
def test_gradient_survives_p_near_one(name, dtype, trained, gap):
    """1 - p is 1e-4 to 1e-17 here: formed as a difference in the dtype it would be noise or 0."""
    spiral_kernels.force_backend(name, "linear_logprob")
    weight = torch.tensor([[gap, 1.0], [0.0, 2.0], [0.0, -0.5]], dtype=dtype)
    hidden = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    logp, entropy, _ = linear_logprob(hidden, weight.requires_grad_(trained), torch.tensor([0]), return_entropy=True)
    logp.sum().backward()
    weight = weight.detach()
    spiral_kernels.force_backend(None, "linear_logprob")
    other = torch.tensor(-gap).double().exp()
    other = other / (1 + 2 * other)
    d_hidden = torch.stack([2 * other, -other, -other]) @ weight.double()
    torch.testing.assert_close(logp.double(), torch.log1p(-2 * other)[None], rtol=1e-5, atol=0)
    true_entropy = -(1 - 2 * other) * torch.log1p(-2 * other) + 2 * torch.special.entr(other)
    torch.testing.assert_close(entropy.double(), true_entropy[None], rtol=1e-5, atol=0)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(hidden.grad[0].double(), d_hidden, rtol=tolerance, atol=0)


def test_common_offset(backend, small_tiles):
    """Logits of 1e4 + k/64 are exact in float32, so the offset must cancel."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-64, 65, (127, 3), generator=generator) / 64
    weight[:, 0] = 1e4
    hidden = torch.cat([torch.ones(20, 1), torch.randint(-3, 4, (20, 2), generator=generator)], 1)
    case = Case(hidden, weight, torch.arange(20))
    found, frozen, true = case.run(), case.run(frozen=True), case.truth()
    for name, absolute in {"logp": 1e-5, "entropy": 1e-5, "lse": 1e-3}.items():  # float32 near 1e4 has steps of 1e-3
        torch.testing.assert_close(found[name].double(), true[name], rtol=0, atol=absolute)
    assert relative(found["d_hidden"][:, 1:], true["d_hidden"][:, 1:]) <= 1e-5
    assert relative(frozen["d_hidden"][:, 1:], true["d_hidden"][:, 1:]) <= 1e-5
    assert relative(found["d_weight"], true["d_weight"]) <= 1e-5


def test_minus_infinity_columns(backend, small_tiles):
    """A column of -inf has probability 0 and touches nothing else, even where it fills whole tiles."""
    case = random_case(127)
    hidden, weight, targets = case.inputs[:3]
    hidden[:, 0] = 1
    weight[:60, 0] = -torch.inf
    targets.copy_(torch.arange(30) + 70)
    found, frozen, true = case.run(), case.run(frozen=True), case.truth()
    for name in ("logp", "lse", "entropy"):
        torch.testing.assert_close(found[name].double(), true[name], rtol=0, atol=1e-5)
    assert relative(found["d_hidden"][:, 1:], true["d_hidden"][:, 1:]) <= 1e-5
    assert relative(frozen["d_hidden"][:, 1:], true["d_hidden"][:, 1:]) <= 1e-5
    assert (found["d_weight"][:60] == 0).all()
    assert relative(found["d_weight"], true["d_weight"]) <= 1e-5


def test_impossible_target(backend):
    case = random_case(20, rows=2)
    case.inputs[0][:, 0] = 1
    case.inputs[1][3, 0] = -torch.inf
    case.inputs[2].fill_(3)
    out = linear_logprob(*case.inputs[:3], return_entropy=True)
    assert (out.logp == -torch.inf).all()
    assert out.entropy.isfinite().all()


def test_nan_is_not_hidden(backend):
    case = random_case(20, rows=2)
    case.inputs[0][0, 0] = torch.nan
    out = linear_logprob(*case.inputs[:3])
    assert out.logp[0].isnan() and out.logp[1].isfinite()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(backend, rows):
    found = check(random_case(127, rows=rows))
    assert found["logp"].shape == (rows,)
    hidden, weight = (x.requires_grad_() for x in random_case(11, rows=4).inputs[:2])
    empty = torch.zeros(0, dtype=torch.int64)
    linear_logprob(hidden, weight, empty, row_index=empty).logp.sum().backward()
    assert (hidden.grad == 0).all() and hidden.grad.shape == (4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_repeated_rows_add_up(backend, small_tiles, dtype):
    """A prefix's last token predicts one token per child: its hidden row serves several rows."""
    case = random_case(127, rows=12, dtype=dtype)
    hidden, weight, _ = case.inputs[:3]
    row_index = torch.tensor([3, 3, 3, 0, 11, 3, 5, 5, 3, 3])
    targets = torch.tensor([1, 2, 1, 0, 126, 5, 6, 7, 8, 9])
    case = Case(hidden, weight, targets, row_index=row_index)
    if dtype == torch.float32:
        found = check(case)
    else:
        found = case.run(frozen=True)
        assert relative(found["d_hidden"], case.truth()["d_hidden"]) <= 1e-2
    assert (found["d_hidden"][[1, 2, 4, 6]] == 0).all()


def test_temperature(backend, small_tiles):
    check(random_case(127, temperature=0.7))
    check(random_case(127, temperature=torch.linspace(0.3, 3, 30)))


def test_inputs_that_are_not_contiguous(backend, small_tiles):
    case = random_case(127)
    hidden, weight, targets = case.inputs[:3]
    wide = torch.stack([targets, targets.flip(0)], 1)
    temperature = torch.linspace(0.5, 2, 60)[::2]
    row_index = torch.arange(30).repeat_interleave(2)[::2]
    hidden = torch.cat([hidden, hidden], 1)[:, ::2]
    weight = weight.t().contiguous().t()
    assert not any(x.is_contiguous() for x in (hidden, weight, wide[:, 0], temperature, row_index))
    check(Case(hidden, weight, wide[:, 0], row_index=row_index, temperature=temperature))


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("name", FLOAT64_BACKENDS)
def test_gradcheck(monkeypatch, name, soft_cap):
    monkeypatch.setitem(tiles.TILE_ROWS, "cpu", 2)
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 6)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets, row_index = torch.tensor([0, 6, 3, 3, 2]), torch.tensor([0, 0, 2, 1, 2])
    of_head = {"temperature": torch.tensor([1.0, 0.5, 2.0, 1.0, 1.5]), "bias": torch.randn(7), "soft_cap": soft_cap}

    def logp(hidden, weight):
        return linear_logprob(hidden, weight, targets, row_index=row_index, **of_head).logp

    spiral_kernels.force_backend(name, "linear_logprob")
    assert torch.autograd.gradcheck(logp, (hidden, weight))
    assert torch.autograd.gradcheck(logp, (hidden, weight.detach()))
    spiral_kernels.force_backend(None, "linear_logprob")


@pytest.mark.parametrize("frozen", [True, False])
def test_two_runs_are_bit_equal(backend, small_tiles, frozen):
    case = random_case(127, row_index=torch.arange(30) // 3, bias=torch.randn(127), soft_cap=3.0)
    first, second = case.run(frozen), case.run(frozen)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("with_row_index", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_opcheck(name, with_row_index):
    hidden, weight = (x.requires_grad_() for x in random_case(11, rows=4).inputs[:2])
    row_index = torch.tensor([0, 1, 1, 3]) if with_row_index else None
    rows = torch.tensor([0, 5, 10, 3]), row_index, torch.ones(4)
    op = torch.ops.spiral_kernels.linear_logprob.default
    torch.library.opcheck(op, (hidden, weight, None, *rows, None, True, False, name))
    torch.library.opcheck(op, (hidden, weight.detach(), torch.randn(11), *rows, 3.0, True, True, name))


def test_the_gradient_has_no_gradient(backend):
    """Autograd would take the stored gradient for constant; only the reference is differentiable twice."""
    for trained in (False, True):
        hidden, weight, targets = random_case(11, rows=4).inputs[:3]
        hidden.requires_grad_(), weight.requires_grad_(trained)
        for linear in (True, False):
            logp = linear_logprob(hidden, weight, targets).logp
            total = logp.sum() if linear else logp.square().sum()
            (d_hidden,) = torch.autograd.grad(total, hidden, create_graph=True)
            penalty = d_hidden.square().sum()
            if backend == "reference":
                penalty.backward()
            else:
                message = "linear_logprob: its gradient has no gradient of its own"
                with pytest.raises(RuntimeError, match=message):
                    torch.autograd.grad(penalty + hidden.sum(), hidden, retain_graph=True)
                with pytest.raises(RuntimeError, match=message):
                    penalty.backward()


def test_compiles(backend):
    hidden, weight, targets = random_case(11).inputs[:3]

    def total(hidden):
        return linear_logprob(hidden * 1.5, weight, targets, temperature=0.7).logp.square().sum()

    hidden.requires_grad_()
    (found,) = torch.autograd.grad(torch.compile(total, fullgraph=True, backend="aot_eager")(hidden), hidden)
    torch.testing.assert_close(found, *torch.autograd.grad(total(hidden), hidden))
    temperatures = torch.compile(
        lambda at: linear_logprob(hidden, weight, targets, temperature=at, soft_cap=at).logp,
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for at in (0.7, 1.3):  # a symbolic number
        expected = linear_logprob(hidden, weight, targets, temperature=at, soft_cap=at).logp
        torch.testing.assert_close(temperatures(at), expected)
    torch.compiler.reset()  # or its cache keeps tensors with their graphs


def test_only_logp_has_a_gradient_and_none_under_no_grad(backend):
    hidden, weight, targets = random_case(11).inputs[:3]
    hidden.requires_grad_()
    out = linear_logprob(hidden, weight, targets, return_entropy=True)
    assert out.logp.requires_grad and not out.lse.requires_grad and not out.entropy.requires_grad
    with torch.no_grad():
        assert not linear_logprob(hidden, weight, targets).logp.requires_grad
    assert linear_logprob(hidden, weight, targets).entropy is None


@pytest.mark.parametrize("name", FAST)
def test_the_forward_forms_the_gradient_of_a_frozen_head_and_of_nothing_else(name):
    class WithGradient(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.spiral_kernels.linear_logprob.default:
                self.found = args[8]
            return func(*args, **(kwargs or {}))

    spiral_kernels.force_backend(name, "linear_logprob")
    hidden, weight, targets = random_case(11).inputs[:3]
    hidden.requires_grad_()
    for of_weight, grad, expected in ((False, True, True), (True, True, False), (False, False, False)):
        with torch.set_grad_enabled(grad), WithGradient() as op:
            linear_logprob(hidden, weight.detach().requires_grad_(of_weight), targets)
        assert op.found is expected
    spiral_kernels.force_backend(None, "linear_logprob")


def test_frozen_head_and_frozen_hidden(backend):
    case = random_case(127)
    hidden, weight, targets = case.inputs[:3]
    hidden.requires_grad_()
    linear_logprob(hidden, weight, targets).logp.sum().backward()
    assert weight.grad is None and hidden.grad is not None
    hidden, weight = hidden.detach(), weight.detach().requires_grad_()
    linear_logprob(hidden, weight, targets).logp.sum().backward()
    assert weight.grad is not None and hidden.grad is None


def test_autocast_does_not_lower_the_precision(backend):
    case = random_case(127)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprob(*case.inputs[:3]).logp
    torch.testing.assert_close(found.double(), case.truth()["logp"], rtol=0, atol=1e-5)


def test_does_not_depend_on_the_split_into_calls(backend):
    """A row's log-prob is that row's alone, whichever rows come with it."""
    hidden, weight, targets = random_case(127, rows=40).inputs[:3]
    whole = linear_logprob(hidden, weight, targets).logp
    parts = [linear_logprob(hidden[i : i + 7], weight, targets[i : i + 7]).logp for i in range(0, 40, 7)]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=1e-6)


class NewStorages(TorchDispatchMode):
    """The sizes in bytes of all storages that operations allocate."""

    def __init__(self, *inputs):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in inputs}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(x.untyped_storage().nbytes())
        return result


def test_a_frozen_head_allocates_nothing_of_its_size():
    hidden, weight = torch.randn(8, 16), torch.randn(50_000, 16)
    targets, scale = torch.arange(8), torch.ones(8)
    head = head_of(weight, None, None)

    def largest(function, *args):
        with NewStorages(hidden, weight) as storages:
            results = function(torch_rows, *args)
        return max(storages.sizes), results

    tile = 4 * 8 * 50_000
    size, (logp, origin, log_norm, _, d_logp) = largest(tiled.forward, hidden, head, targets, None, scale, False, True)
    assert size == tile and d_logp.shape == hidden.shape
    size, (*_, d_logp) = largest(tiled.forward, hidden, head, targets, None, scale, False, False)
    assert size == tile and d_logp.numel() == 0
    rows = torch.ones(8), hidden, head, targets, None, scale, origin, log_norm, logp, True
    assert largest(tiled.backward, *rows, False)[0] == tile
    assert largest(tiled.backward, *rows, True)[0] == 4 * weight.numel()


MEMORY = """
import resource, sys, torch
import spiral_kernels
torch.set_num_threads(1)
spiral_kernels.force_backend(sys.argv[1], "linear_logprob")
def step(rows, vocabulary):
    hidden, weight = torch.randn(rows, 32, requires_grad=True), torch.randn(vocabulary, 32)
    targets = torch.randint(vocabulary, (rows,))
    out = spiral_kernels.linear_logprob(hidden, weight, targets, return_entropy=True)
    out.logp.sum().backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
step(64, 20_000)
before = peak()
for rows, vocabulary in (4096, 20_000), (1024, 80_000):
    step(rows, vocabulary)
    print(peak() - before)
"""


@pytest.mark.parametrize("name", FAST)
def test_peak_memory_does_not_grow_with_rows_times_vocabulary(name):
    """Process memory beyond a call with 64 rows; the logits would be 328 MB."""
    run = subprocess.run([sys.executable, "-c", MEMORY, name], capture_output=True, text=True, check=True)
    for extra_mb in run.stdout.split():
        assert float(extra_mb) < 40


@pytest.mark.slow
def test_more_than_two_to_the_31_logits(backend):
    """Rows near the end of R x V > 2^31 hold the same numbers as alone."""
    if backend == "reference":
        pytest.skip("the reference keeps all logits")
    rows, vocabulary = 140_000, 16_000
    hidden, weight, targets = random_case(vocabulary, rows=4, size=1).inputs[:3]
    row_index = torch.zeros(rows, dtype=torch.int64)
    row_index[-4:] = torch.arange(4)
    many = torch.zeros(rows, dtype=torch.int64)
    many[-4:] = targets
    found = linear_logprob(hidden, weight, many, row_index=row_index).logp[-4:]
    torch.testing.assert_close(found, linear_logprob(hidden, weight, targets).logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, r"hidden must be \(N, H\)"),
        ({"weight": torch.zeros(0, 3)}, r"weight must be \(V, H\) with V > 0"),
        ({"weight": torch.zeros(5, 2)}, ".* differ in H"),
        ({"hidden": torch.zeros(4, 3, dtype=torch.float16)}, "hidden must be float32, bfloat16 or float64"),
        ({"weight": torch.zeros(5, 3, dtype=torch.bfloat16)}, ".* differ in dtype"),
        ({"targets": torch.zeros(4)}, r"targets must be \(R,\) int64"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ".* one entry per row"),
        ({"row_index": torch.zeros(3, dtype=torch.int64)}, r"row_index must be \(4,\) int64, got \(3,\)"),
        ({"bias": torch.zeros(4)}, r"bias must be \(5,\) real numbers, got \(4,\)"),
        ({"bias": torch.zeros(5, dtype=torch.int64)}, "bias must be .* got .*int64"),
        ({"bias": torch.zeros(5, requires_grad=True)}, "bias carries no gradient; detach it"),
        ({"bias": torch.zeros(5, device="meta")}, "bias is on meta"),
        ({"soft_cap": 0.0}, "soft_cap must be a finite number > 0, got 0.0"),
        ({"soft_cap": math.inf}, "soft_cap must be a finite number > 0, got inf"),
        ({"soft_cap": True}, "soft_cap must be a finite number > 0, got True"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0"),
        ({"temperature": math.nan}, "temperature must be a finite number > 0, got nan"),
        ({"temperature": "1"}, "temperature must be a finite number > 0, got '1'"),
        ({"temperature": torch.ones(3)}, r"temperature must be \(4,\) real numbers, got \(3,\)"),
        ({"temperature": torch.ones(4, dtype=torch.complex64)}, r"temperature must be \(4,\) real numbers"),
        ({"temperature": torch.tensor([1, 2, 0.0, 1])}, "temperature must be > 0 and finite, found 0.0"),
        ({"temperature": torch.tensor([1, -2.0, 1, 1])}, "temperature must be > 0 and finite, found -2.0"),
        ({"temperature": torch.tensor([1, 1, 1, math.nan])}, "temperature must be > 0 and finite, found nan"),
        ({"temperature": 1e-45}, "temperature must be > 0 and finite, found 0.0"),
        ({"return_entropy": 1}, "return_entropy must be True or False, got 1"),
        ({"hidden": [[0.0] * 3] * 4}, "hidden must be a dense tensor, got list"),
        ({"weight": None}, "weight must be a dense tensor, got NoneType"),
        ({"hidden": torch.zeros(4, 3).to_sparse()}, "hidden must be a dense tensor"),
        ({"weight": torch.zeros(5, 3, device="meta")}, "weight is on meta"),
    ],
)
def test_bad_input_is_one_clear_line(backend, change, message):
    inputs = {"hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "targets": torch.zeros(4, dtype=torch.int64)}
    inputs |= change
    with pytest.raises(ValueError, match=f"^linear_logprob: {message}") as error:
        linear_logprob(**inputs)
    assert "\n" not in str(error.value)


def test_index_out_of_range(backend):
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=rf"targets must lie in 0 \.\. 4, found {bad}"):
            linear_logprob(hidden, weight, torch.tensor([0, bad]))
    for bad in (-1, 2):
        with pytest.raises(IndexError, match=rf"row_index must lie in 0 \.\. 1, found {bad}"):
            linear_logprob(hidden, weight, torch.tensor([0]), row_index=torch.tensor([bad]))

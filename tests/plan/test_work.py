"""Tokens, FLOPs, bytes and passes against brute force: token by token, request by request."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from spiral_fast.config import ModelConfig
from spiral_fast.learner.empty_model import empty_model
from spiral_fast.learner.learner import Learner
from spiral_fast.learner.model import load_model
from spiral_fast.loss_rows import loss_rows
from spiral_fast.plan.learner_work import learner_work
from spiral_fast.plan.lengths import parse_lengths
from spiral_fast.plan.rollout_work import STEP_SECONDS, Limits, Rates, Requests, requests_of, rollout_work
from spiral_fast.plan.shape import shape_of
from spiral_fast.plan.simulated import Simulated, Workload
from spiral_fast.trace import SEARCH
from tests.plan.test_simulated import THREE_LEVELS, config_of, simulated

SHAPE = shape_of(empty_model(ModelConfig(path="-"), Path(__file__).parent / "qwen3_4b"))


def prefixes(sequences) -> int:
    """Distinct non-empty prefixes."""
    return len({tuple(sequence[:n]) for sequence in sequences for n in range(1, len(sequence) + 1)})


def test_tokens_and_flops_of_a_step_by_brute_force():
    config = config_of("learner.micro_batch_tokens=1000000")
    live = [rollout for rollout in simulated().rollouts([0, 1, 2]) if rollout.live]
    work = learner_work(live, config, SHAPE.cost)
    rows = loss_rows(live, config)

    def documents(rows):
        return [row.prompt + row.tokens[:-1] for row in rows]

    assert work["flat"].tokens == sum(map(len, documents(rows)))
    assert work["flat"].rows == work["tree"].rows == sum(len(row.tokens) for row in rows)
    for name, some in (("tree", rows), ("pruned", [row for row in rows if row.credit])):
        by_level = [[row for row in some if (row.level == SEARCH) == search] for search in (True, False)]
        # chance agreements of fewer than MIN_SHARED_RUN tokens are not shared
        assert work[name].tokens == pytest.approx(sum(prefixes(documents(level)) for level in by_level), abs=12)
    of_set = sum(len(row.tokens) - 1 for row in rows) + sum(len(p) for p in {tuple(row.prompt) for row in rows})
    assert work["set"].tokens == of_set
    pairs = sum(n * (n + 1) // 2 for n in map(len, documents(rows)))
    assert work["flat"].flops == SHAPE.cost.flops(work["flat"].tokens, pairs, work["flat"].rows)
    assert work["flat"].flops > work["set"].flops > work["tree"].flops > work["pruned"].flops > 0


def test_what_is_planned_is_what_the_learner_reports():
    """StepStats of the real learner on the demo's model, of the same simulated rows."""
    config = config_of("learner.micro_batch_tokens=300", "learner.self_check=false", name="demo")
    torch.manual_seed(0)
    loaded = load_model(config.model, "cpu")
    learner = Learner(config, loaded)
    of = Simulated(config, Workload(parse_lengths("uniform:5:20"), 40, None))
    live = [rollout for rollout in of.rollouts(list(range(6))) if rollout.live]
    vocabulary = loaded.causal_lm.config.vocab_size
    for trace in (trace for rollout in live for trace in rollout.traces()):
        trace.prompt = [token % vocabulary for token in trace.prompt]
        trace.tokens = [token % vocabulary for token in trace.tokens]
    work = learner_work(live, config, learner.cost)
    stats = learner.accumulate(loss_rows(live, config))
    assert stats.skipped_reason is None
    assert (work["pruned"].tokens, work["pruned"].flops) == (stats.tokens_computed, stats.flops_computed)
    assert work["flat"].flops == stats.flops_logical
    assert work["pruned"].micro_batches == stats.micro_batches


def test_an_empty_model_is_the_loaded_one_without_weights():
    config = ModelConfig(path="builtin:parts", dtype="float32")
    shape = shape_of(empty_model(config))
    assert shape == shape_of(load_model(config, "cpu").model)
    two = config.model_copy(update={"policy": "two_adapters"})
    expected = replace(shape, adapter_numbers=2 * shape.adapter_numbers)  # held; a token passes one of them
    assert shape_of(empty_model(two)) == shape_of(load_model(two, "cpu").model) == expected


def test_requests_of_a_problem():
    rollout = simulated().rollouts([1])[0]
    found = requests_of(rollout)
    prompts = [trace.prompt for trace in rollout.traces()]
    assert found.prompt_tokens == sum(map(len, prompts))
    assert found.prefill_tokens == prefixes(prompts)
    distinct = {tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)}
    assert found.prefill_pairs == sum(map(len, distinct))
    assert found.search == [len(trace.tokens) for trace in rollout.search]
    apart = requests_of(rollout, two_adapters=True)
    of_search, of_aggregation = ([t.prompt for t in rollout.traces() if (t.key.level == 0) == s] for s in (True, False))
    assert apart.prefill_tokens == prefixes(of_search) + prefixes(of_aggregation) > found.prefill_tokens
    assert apart == found._replace(prefill_tokens=apart.prefill_tokens, prefill_pairs=apart.prefill_pairs)


def levels_of_requests(problem: Requests) -> list[list[tuple[int, int, int]]]:
    """Of each level: (group, prompt, length) of its requests."""
    groups = [[(k, prompt, n) for n in traces] for k, (prompt, traces) in enumerate(problem.aggregation, 1)]
    levels = [[(0, problem.search_prompt, n) for n in problem.search]]
    for n_sets in problem.sets:
        levels.append([request for group in groups[:n_sets] for request in group])
        groups = groups[n_sets:]
    return levels


def decode_by_passes(problems: list[Requests], limits: Limits) -> dict[str, float]:
    """One pass at a time, every running request looked at."""
    waiting = [(p, 0, problem.search_prompt, n) for p, problem in enumerate(problems) for n in problem.search]
    running, done = [], [0] * len(problems)
    of_levels = [levels_of_requests(problem) for problem in problems]
    total = dict(passes=0, bytes=0.0, unshared=0.0, flops=0.0, most=0)
    weights = SHAPE.matrix_numbers + SHAPE.vocabulary * SHAPE.hidden
    while waiting or running:
        while waiting and len(running) < limits.running:
            p, group, prompt, n = waiting[0]
            prompts = {(r["p"], r["group"]): r["prompt"] for r in running} | {(p, group): prompt}
            if running and sum(prompts.values()) + sum(r["n"] for r in running) + n > limits.tokens:
                break
            waiting.pop(0)
            running.append({"p": p, "group": group, "prompt": prompt, "n": n, "own": 0})
        prompts = {(r["p"], r["group"]): r["prompt"] for r in running}
        own = sum(r["own"] + 0.5 for r in running)  # in the middle of the pass
        of_all = sum(r["prompt"] for r in running)
        read = weights * SHAPE.element + SHAPE.kv_bytes * (own + sum(prompts.values()))
        total["passes"] += 1
        total["most"] = max(total["most"], len(running))
        total["bytes"] += read
        total["unshared"] += read + SHAPE.kv_bytes * (of_all - sum(prompts.values()))
        total["flops"] += len(running) * 2 * weights + 4 * SHAPE.query * SHAPE.layers * (own + of_all)
        for r in running:
            r["own"] += 1
        for r in [r for r in running if r["own"] == r["n"]]:
            running.remove(r)
            p = r["p"]
            done[p] += 1
            for number, below in enumerate(accumulate(map(len, of_levels[p][:-1])), start=1):
                if done[p] == below:
                    waiting += [(p, *request) for request in of_levels[p][number]]
                    waiting.sort(key=lambda request: request[:2])  # older problems first; stable
    return total


@pytest.mark.parametrize("levels", [(), THREE_LEVELS])
@pytest.mark.parametrize("limits", [Limits(256, 10**9, 512), Limits(10, 10**9, 512), Limits(256, 1500, 512)])
def test_decode_pass_by_pass(limits, levels):
    of = simulated(*levels, lengths="uniform:3:30")
    problems = [requests_of(rollout) for rollout in of.rollouts([0, 1, 2, 3])]
    assert [len(problem.sets) for problem in problems] == [2 if levels else 1] * 4
    found = rollout_work(SHAPE, problems, Rates(4e14, 2e12), limits)
    truth = decode_by_passes(problems, limits)
    assert found.decode_passes == truth["passes"] and found.most_running == truth["most"]
    assert found.decode_bytes == pytest.approx(truth["bytes"], rel=1e-12)
    assert found.decode_bytes_unshared == pytest.approx(truth["unshared"], rel=1e-12)
    assert found.decode_flops == pytest.approx(truth["flops"], rel=1e-12)
    assert found.most_tokens <= limits.tokens
    assert found.decode_seconds <= found.decode_seconds_unshared
    assert found.decode_seconds_unshared >= truth["unshared"] / 2e12
    assert found.decode_seconds >= truth["bytes"] / 2e12 + truth["passes"] * STEP_SECONDS * (1 - 1e-9)


def test_rooflines_of_a_single_request():
    """Decode of one request is bound by the weights' bytes, prefill of a long prompt by FLOPs."""
    one = Requests(8192, [100], [], 8192, 8192, 8192 * 8193 // 2)
    found = rollout_work(SHAPE, [one], Rates(4e14, 2e12), Limits(256, 10**6, 4096))
    numbers = SHAPE.matrix_numbers + SHAPE.vocabulary * SHAPE.hidden
    read = 2 * numbers + SHAPE.kv_bytes * (8192 + 50)
    assert found.decode_seconds == pytest.approx(100 * (read / 2e12 + STEP_SECONDS))
    flops = 2 * SHAPE.matrix_numbers * 8192 + 4 * 4096 * 36 * 8192 * 8193 / 2
    assert found.prefill_seconds == pytest.approx(flops / 4e14)
    slow = rollout_work(SHAPE, [one], Rates(1e18, 2e12), Limits(256, 10**6, 4096))
    assert slow.prefill_seconds == pytest.approx(2 * 2 * numbers / 2e12)  # two chunks read the weights twice


def test_shape_of_qwen3_4b():
    """Its published size: 4.0 billion parameters, of them 3.6 without the embedding; LoRA of rank 32 on all layers."""
    assert SHAPE.base_numbers == 4_022_468_096 and SHAPE.adapter_numbers == 66_060_288
    assert SHAPE.kv_bytes == 2 * 36 * 8 * 128 * 2
    assert SHAPE.matrix_numbers == 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728) + 66_060_288
    assert replace(SHAPE, element=4).base_bytes == 2 * SHAPE.base_bytes

"""Rollout by roofline: what a server of the engine must compute and read, and the seconds that takes at stated rates.

Prefill: distinct prompt tokens, once each; bound by FLOPs or by reading the weights once a chunk. Decode: one token of
every running request a pass; it reads the weights once, a request's own keys and values, and those of a prompt once for
all running requests that share it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spiral_fast.lists import Lists
from spiral_fast.plan.shape import Shape
from spiral_fast.trace import ProblemRollout
from spiral_kernels import PrefixTree

STEP_SECONDS = 0.001  # of a decode pass beside the roofline: scheduling, sampling


class Rates(NamedTuple):
    """Of one server: what is reached, not what the sheet says."""

    flops: float  # FLOP/s of large products
    bandwidth: float  # bytes/s


class Limits(NamedTuple):
    """Of one server."""

    running: int  # requests decoded together
    tokens: int  # keys and values it has room for
    chunk: int  # prompt tokens of one pass


class Requests(NamedTuple):
    """Of one problem; lengths in tokens."""

    search_prompt: int
    search: list[int]
    aggregation: list[tuple[int, list[int]]]  # of each set, level by level: prompt, traces
    prompt_tokens: int  # of all requests
    prefill_tokens: int  # distinct ones
    prefill_pairs: int  # (query, key) pairs of them
    sets: tuple[int, ...] = ()  # in each level above search; () = all are in one


@dataclass
class RolloutWork:
    """Of one server and step, and the seconds it takes."""

    problems: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    prefill_flops: float = 0.0
    prefill_seconds: float = 0.0
    generated: int = 0
    decode_passes: int = 0
    decode_flops: float = 0.0
    decode_bytes: float = 0.0
    decode_bytes_unshared: float = 0.0  # each request reading the whole of its prompt itself
    decode_seconds: float = 0.0
    decode_seconds_unshared: float = 0.0
    most_running: int = 0
    most_tokens: int = 0  # keys and values held at once

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def requests_of(rollout: ProblemRollout, *, two_adapters: bool = False) -> Requests:
    """two_adapters: a search prompt's keys and values are of no use to an aggregation."""
    levels = [[group for group in level.groups if group] for level in rollout.levels]
    groups = [group for level in levels for group in level]
    prompts = [rollout.search[0].prompt, *(group[0].prompt for group in groups)]
    together = [prompts[:1], prompts[1:]] if two_adapters else [prompts]
    trees = [_prefixes(some) for some in together if some]
    return Requests(
        len(prompts[0]),
        [len(trace.tokens) for trace in rollout.search],
        [(len(group[0].prompt), [len(trace.tokens) for trace in group]) for group in groups],
        sum(len(trace.prompt) for trace in rollout.traces()),
        sum(len(tree.tokens) for tree in trees),
        sum(int((tree.positions + 1).sum()) for tree in trees),
        tuple(map(len, levels)),
    )


def _prefixes(prompts: list[list[int]]) -> PrefixTree:
    tokens, offsets = Lists.of([np.asarray(prompt, np.int64) for prompt in prompts])
    return PrefixTree.build(tokens, offsets, np.zeros(len(tokens), bool))


def rollout_work(shape: Shape, problems: list[Requests], rates: Rates, limits: Limits) -> RolloutWork:
    """Of one server with these problems, all there at the start; older problems go first. A request is admitted when
    all of its keys and values, to its end, have room."""
    work = RolloutWork(len(problems))
    weights = _weights(shape)
    for problem in problems:
        work.prompt_tokens += problem.prompt_tokens
        work.prefill_tokens += problem.prefill_tokens
        pairs = _attention(shape) * problem.prefill_pairs
        work.prefill_flops += 2 * shape.matrix_numbers * problem.prefill_tokens + pairs
        work.generated += sum(problem.search) + sum(sum(traces) for _, traces in problem.aggregation)
    chunks = work.prefill_tokens / limits.chunk
    work.prefill_seconds = max(work.prefill_flops / rates.flops, chunks * weights / rates.bandwidth)
    _decode(shape, problems, rates, limits, work)
    return work


def _weights(shape: Shape) -> float:
    """Bytes of a pass: decoder and head; of an untied model the embedding is looked up, not read."""
    return (shape.matrix_numbers + shape.vocabulary * shape.hidden) * shape.element


def _attention(shape: Shape) -> float:
    """FLOPs of a (query, key) pair, all layers, forward."""
    return 4.0 * shape.query * shape.layers


class _Running(NamedTuple):
    """In the order in which they finish."""

    end: int  # decode pass
    number: int
    begin: int
    problem: int
    group: int  # 0 search, 1.. the sets
    prompt: int
    room: int


def _decode(shape: Shape, problems: list[Requests], rates: Rates, limits: Limits, work: RolloutWork) -> None:
    """Between two finishing requests the batch is the same and its keys grow evenly: the mean pass stands for all."""
    queue = [(i, 0, deque(problem.search)) for i, problem in enumerate(problems)]  # a heap: older problems first
    waiting = [len(problem.search) for problem in problems]  # unfinished requests of the level a problem is at
    next_groups = [_groups_by_level(problem) for problem in problems]
    running: list[_Running] = []
    sharers: Counter = Counter()  # running requests by (problem, group)
    now = number = held = prompts = prompts_unshared = begins = 0  # prompts: keys of the running requests' prompts
    per_token = 2 * (shape.matrix_numbers + shape.vocabulary * shape.hidden)
    while queue or running:
        while queue and len(running) < limits.running:
            problem, group, lengths = queue[0]
            prompt = problems[problem].search_prompt if group == 0 else problems[problem].aggregation[group - 1][0]
            new = 0 if sharers[problem, group] else prompt
            if running and held + new + lengths[0] > limits.tokens:
                break
            length = lengths.popleft()
            if not lengths:
                heapq.heappop(queue)
            heapq.heappush(running, _Running(now + length, number, now, problem, group, prompt, length))
            sharers[problem, group] += 1
            number += 1
            held += new + length
            prompts += new
            prompts_unshared += prompt
            begins += now
        work.most_running = max(work.most_running, len(running))
        work.most_tokens = max(work.most_tokens, held)
        passes = running[0].end - now
        own = len(running) * (now + passes / 2) - begins  # mean sum of the requests' own tokens
        flops = len(running) * per_token + _attention(shape) * (own + prompts_unshared)
        read = _weights(shape) + shape.kv_bytes * (own + prompts)
        work.decode_passes += passes
        work.decode_flops += passes * flops
        unshared = read + shape.kv_bytes * (prompts_unshared - prompts)
        work.decode_bytes += passes * read
        work.decode_bytes_unshared += passes * unshared
        work.decode_seconds += passes * (max(flops / rates.flops, read / rates.bandwidth) + STEP_SECONDS)
        work.decode_seconds_unshared += passes * (max(flops / rates.flops, unshared / rates.bandwidth) + STEP_SECONDS)
        now += passes
        while running and running[0].end == now:
            done = heapq.heappop(running)
            begins -= done.begin
            prompts_unshared -= done.prompt
            sharers[done.problem, done.group] -= 1
            last = not sharers[done.problem, done.group]
            held -= done.room + (done.prompt if last else 0)
            prompts -= done.prompt if last else 0
            waiting[done.problem] -= 1
            if not waiting[done.problem] and next_groups[done.problem]:
                for group, lengths in next_groups[done.problem].popleft():
                    waiting[done.problem] += len(lengths)
                    heapq.heappush(queue, (done.problem, group, deque(lengths)))


def _groups_by_level(problem: Requests) -> deque[list[tuple[int, list[int]]]]:
    """Of each level above search its groups: number, lengths of the traces."""
    groups = [(number, traces) for number, (_, traces) in enumerate(problem.aggregation, start=1)]
    ends = np.cumsum(problem.sets or [len(groups)]).tolist()
    return deque(groups[first:end] for first, end in zip([0, *ends], ends, strict=False))

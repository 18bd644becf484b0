"""What the parts model can do, sampled plainly with transformers' generate: the figures on its card."""

from __future__ import annotations

import random
from math import comb

import torch

from spiral_fast.problems.parts import check, parse, problem_stream, solves
from spiral_fast.prompts.parts import PartsPrompts
from spiral_fast.trace import Problem


@torch.no_grad()
def sample(model, prompts: list[list[int]], max_new_tokens: int, batch: int = 1024) -> list[list[int]]:
    """One completion per prompt at temperature 1, end of sequence included; seeded by torch's global generator."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    completions = []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        width = max(map(len, rows))
        inputs = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        sampled = model.generate(
            inputs,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        for row in sampled[:, width:].tolist():
            completions.append(row[: row.index(eos) + 1] if eos in row else row)
    return completions


def measure(
    model,
    tokenizer,
    *,
    variable_length: bool,
    problems: int = 192,
    samples: int = 16,
    rsa_steps: int = 3,
    seed: int = 1,
) -> dict:
    """pass@1, pass@8, part accuracy of search; mean reward of recursive self-aggregation (population 8, sets of 4)."""
    population, set_size = 8, 4
    torch.manual_seed(seed)
    rng = random.Random(seed)
    prompts = PartsPrompts(tokenizer)
    stream = problem_stream(f"measure {seed}", variable_length, "measure")
    asked = [next(stream) for _ in range(problems)]
    limit = 96 if variable_length else 24

    traces = sample(model, [prompts.search(problem) for problem in asked for _ in range(samples)], limit)
    graded = [_grade(prompts, model, asked[index // samples], trace) for index, trace in enumerate(traces)]
    right = [sum(reward for reward, _ in graded[start : start + samples]) for start in range(0, len(graded), samples)]
    result = {
        "pass@1": sum(right) / (problems * samples),
        "pass@8": sum(1 - comb(samples - c, 8) / comb(samples, 8) for c in right) / problems,
        "part": sum(part for _, part in graded) / len(graded),
        "format": sum(parse(prompts.decode(trace)) is not None for trace in traces) / len(traces),
        "search_tokens": sum(map(len, traces)) / len(traces),
    }
    pools = [traces[start : start + population] for start in range(0, len(traces), samples)]
    for step in range(1, rsa_steps + 1):
        asked_sets = [
            prompts.aggregation(problem, rng.sample(pool, set_size))
            for problem, pool in zip(asked, pools, strict=True)
            for _ in range(population)
        ]
        merged = sample(model, asked_sets, limit)
        graded = [_grade(prompts, model, asked[index // population], trace) for index, trace in enumerate(merged)]
        result[f"rsa {step}"] = sum(reward for reward, _ in graded) / len(graded)
        if step == 1:
            result["aggregation_tokens"] = sum(map(len, merged)) / len(merged)
        pools = [merged[start : start + population] for start in range(0, len(merged), population)]
    return result


def _grade(prompts: PartsPrompts, model, problem: Problem, trace: list[int]) -> tuple[bool, float]:
    """(reward, share of right parts)."""
    text = prompts.decode(trace)
    stopped = trace[-1] == model.config.eos_token_id
    attempts = parse(text)
    if attempts is None:
        return False, 0.0
    hits = [solves(tuple(part), tried[-1]) for part, tried in zip(problem.data["parts"], attempts, strict=True)]
    return check(problem, text, "stop" if stopped else "length"), sum(hits) / len(hits)

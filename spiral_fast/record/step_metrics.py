"""One step's numbers from what the step produced. Names and units: docs/metrics.md."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict

import numpy as np
import torch

from spiral_fast.levels import level_name
from spiral_fast.rollout.engine import TokenCounts
from spiral_fast.rollout.live_batch import LiveBatch
from spiral_fast.trace import ProblemRollout, Trace


def rollout_metrics(batch: LiveBatch, counts: TokenCounts | None) -> dict[str, float]:
    """Problems, rewards, credits, answers, lengths and tokens of a step; `counts` are the engine's tokens of this step
    (None in a replay, which has no engine)."""
    drawn = batch.drawn()
    metrics = {
        "problems/drawn": len(drawn),
        "problems/live": len(batch.live),
        "problems/dead": len(batch.dead),
        "problems/discarded": len(batch.discarded),
        "problems/rounds": batch.rounds,
        "tokens/wasted": sum(len(t.tokens) for r in batch.dead + batch.discarded for t in r.traces()),
    }
    if counts is not None:
        metrics |= {f"tokens/{name}": value for name, value in asdict(counts).items()}
    for level in sorted({trace.key.level for rollout in drawn for trace in rollout.traces()}):
        name = level_name(level)
        problems = [[trace for trace in rollout.traces() if trace.key.level == level] for rollout in drawn]
        problems = [traces for traces in problems if traces]
        metrics |= {f"{key}_{name}" if "/" in key else f"{key}/{name}": v for key, v in _level(problems).items()}
    graded = [trace for rollout in drawn for trace in rollout.traces() if trace.verdict]
    metrics["reward/could_not_grade"] = _share(trace.verdict == "could_not_grade" for trace in graded)
    return metrics | _appearances(drawn)


def learner_metrics(stats) -> dict[str, float]:
    """From the learner's StepStats. A skipped step says why in `skipped`."""
    metrics = {
        "loss": stats.loss,
        "learning_rate": stats.learning_rate,
        "policy_version": stats.policy_version,
        "grad/norm": stats.gradient_norm,
        "grad/norm_search": stats.search_gradient_norm,
        "grad/norm_aggregation": stats.aggregation_gradient_norm,
        "grad/clip_factor": stats.clip_factor,
        "grad/clipped": float(stats.clipped),
        "logp_gap/mean": stats.logp_gap_mean,
        "logp_gap/max": stats.logp_gap_max,
        "logp_gap/kl": stats.kl,
        "logp_gap/ratio_max": stats.ratio_max,
        "tokens/learner_logical": stats.tokens_logical,
        "tokens/learner_computed": stats.tokens_computed,
        "tokens/learner_trained": stats.tokens_trained,
        "flops/learner_logical": stats.flops_logical,
        "flops/learner_computed": stats.flops_computed,
        "learner/micro_batches": stats.micro_batches,
        "learner/live_rows": stats.live_rows,
        "skipped": stats.skipped_reason,
    }
    if stats.gradient_cosine is not None:
        metrics["grad/cosine"] = stats.gradient_cosine
    return metrics | {f"entropy/{level_name(level)}": value for level, value in stats.entropy.items()}


def speed_metrics(stats, seconds: float | None, peak: float | None) -> dict[str, float]:
    """How fast the learner was. seconds: those of `time/learn`; peak: FLOP/s of its GPUs together, None where unknown.

    MFU is flops_computed over what the GPUs could have computed in that time: of prefixes that are shared and rows that
    are left out nothing counts, and nothing of what checkpointing computes again (spiral_fast/learner/cost.py). Under
    time/, since the machine decides."""
    if not (seconds and stats.flops_computed):
        return {}
    metrics = {
        "time/learner_tokens_per_s_logical": stats.tokens_logical / seconds,
        "time/learner_tokens_per_s_computed": stats.tokens_computed / seconds,
        "time/learner_tflops_per_s": stats.flops_computed / seconds / 1e12,
    }
    return metrics if peak is None else metrics | {"time/learner_mfu": stats.flops_computed / seconds / peak}


def memory_metrics() -> dict[str, float]:
    """Peak memory of the process so far, MB: resident, and allocated on the GPU. Like all that the machine decides, and
    not the run, it stands under time/."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"time/peak_rss_mb": peak / (1e6 if sys.platform == "darwin" else 1e3)}
    if torch.cuda.is_available():
        metrics["time/peak_cuda_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return metrics


def _level(problems: list[list[Trace]]) -> dict[str, float]:
    """Of the traces of one level, by problem."""
    traces = [trace for problem in problems for trace in problem]
    credits = np.array([trace.credit for trace in traces])
    lengths = np.array([len(trace.tokens) for trace in traces])
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    return {
        "reward": float(np.mean(rewards)) if rewards else math.nan,
        "answers/distinct": float(np.mean([len({trace.answer for trace in p} - {None}) for p in problems])),
        "length": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/cut_share": _share(trace.finish_reason == "length" for trace in traces),
        "credit/live_share": float(np.mean(credits != 0)),
        "credit/gated_share": _share(trace.gated for trace in traces),
        "credit/abs_mean": float(np.mean(np.abs(credits))),
        "nll": float(-np.concatenate([trace.logp for trace in traces]).mean()),
    }


def _appearances(drawn: list[ProblemRollout]) -> dict[str, float]:
    """In how many sets of its problem a search trace is."""
    with_sets = [rollout for rollout in drawn if len(rollout.sets)]
    if not with_sets:
        return {}
    members = [rollout.sets[rollout.sets >= 0] for rollout in with_sets]
    counts = [np.bincount(one, minlength=len(r.search)) for one, r in zip(members, with_sets, strict=True)]
    counts = np.concatenate(counts)
    return {
        "sets/appearances_mean": float(counts.mean()),
        "sets/appearances_min": int(counts.min()),
        "sets/appearances_max": int(counts.max()),
        "sets/unused_traces": float(np.mean(counts == 0)),
    }


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return float(np.mean(flags)) if flags else 0.0

"""One step's numbers from what the step produced. Names and units: docs/metrics.md."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable

import numpy as np

from spiral_fast.rollout.engine import TokenCounts
from spiral_fast.rollout.live_batch import LiveBatch
from spiral_fast.trace import AGGREGATION, SEARCH, Trace

LEVEL = {SEARCH: "search", AGGREGATION: "aggregation"}


def rollout_metrics(batch: LiveBatch, counts: TokenCounts) -> dict[str, float]:
    """Problems, rewards, credits, lengths and tokens of a step; `counts` are the engine's tokens of this step."""
    drawn = batch.drawn()
    metrics = {
        "problems/drawn": len(drawn),
        "problems/live": len(batch.live),
        "problems/dead": len(batch.dead),
        "problems/discarded": len(batch.discarded),
        "problems/rounds": batch.rounds,
        "tokens/prompt": counts.prompt,
        "tokens/cached": counts.cached,
        "tokens/computed": counts.computed,
        "tokens/generated": counts.generated,
        "tokens/wasted": sum(len(t.tokens) for r in batch.dead + batch.discarded for t in r.traces()),
    }
    for level, name in LEVEL.items():
        traces = [trace for rollout in drawn for trace in rollout.traces() if trace.key.level == level]
        if traces:
            metrics |= {f"{key}_{name}" if "/" in key else f"{key}/{name}": v for key, v in _level(traces).items()}
    graded = [trace for rollout in drawn for trace in rollout.traces() if trace.verdict]
    metrics["reward/could_not_grade"] = _share(trace.verdict == "could_not_grade" for trace in graded)
    used = [_appearances(rollout) for rollout in drawn if len(rollout.sets)]
    if used:
        metrics["sets/unused_traces"] = float(np.mean([np.mean(count == 0) for count in used]))
    return metrics


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
        "learner/micro_batches": stats.micro_batches,
        "learner/live_rows": stats.live_rows,
        "skipped": stats.skipped_reason,
    }
    if stats.gradient_cosine is not None:
        metrics["grad/cosine"] = stats.gradient_cosine
    return metrics | {f"entropy/{LEVEL[level]}": value for level, value in stats.entropy.items()}


def memory_metrics() -> dict[str, float]:
    """Peak resident memory of the process so far, MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/peak_rss_mb": peak / (1e6 if sys.platform == "darwin" else 1e3)}


def _level(traces: list[Trace]) -> dict[str, float]:
    credits = np.array([trace.credit for trace in traces])
    lengths = np.array([len(trace.tokens) for trace in traces])
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    return {
        "reward": float(np.mean(rewards)) if rewards else math.nan,
        "length": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/cut_share": _share(trace.finish_reason == "length" for trace in traces),
        "credit/live_share": float(np.mean(credits != 0)),
        "credit/gated_share": _share(trace.gated for trace in traces),
        "credit/abs_mean": float(np.mean(np.abs(credits))),
        "nll": float(-np.concatenate([trace.logp for trace in traces]).mean()),
    }


def _appearances(rollout) -> np.ndarray:
    return np.bincount(rollout.sets.reshape(-1), minlength=len(rollout.search))


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return float(np.mean(flags)) if flags else 0.0

"""Memory for the largest step: a whole update whose micro-batches are the largest the config allows."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from spiral_fast.learner.learner import Row
from spiral_fast.levels import max_new_tokens
from spiral_fast.supported import key_value_shape
from spiral_fast.trace import AGGREGATION, SEARCH
from spiral_fast.verify.result import FAIL, PASS, Result
from spiral_fast.verify.subject import Subject

SECONDS = 40.0  # the update may take; above it a smaller one is made and its growth extrapolated


def memory_for_the_largest_step(subject: Subject) -> Result:
    """Peak of an update from the longest row there can be and from rows that fill micro_batch_tokens.

    On a GPU: peak allocated, of the device's memory. On a CPU: peak resident memory of this process, of the machine's
    or its control group's. The engine's cache is empty meanwhile, as in a run, so it is added up apart.
    """
    device = torch.device(subject.learner.device)
    budget, longest = subject.config.learner.micro_batch_tokens, subject.worst.longest
    affordable = SECONDS * subject.learner_tokens_per_s
    share = min(1.0, affordable / (budget + longest))
    before = start_peak(device)
    stats = subject.learner.step(_rows(subject, int(longest * share), int(budget * share)))
    if stats.skipped_reason:
        raise FloatingPointError(stats.skipped_reason)
    peak = peak_bytes(device)
    note = f"row of {longest:,} tokens, micro-batch of {budget:,}"
    if share < 1:
        peak = before + (peak - before) / share
        note += f"; extrapolated from {share:.0%} of both (the machine is slow)"
    weights = sum(p.numel() * p.element_size() for p in subject.loaded.causal_lm.parameters())
    cache = subject.config.rollout.cache_tokens * _cache_bytes_per_token(subject)
    if subject.on_servers:
        cache, held = 0, "; an SGLang server's own memory is not looked at"
    else:
        held = f"; a full cache takes {_gb(cache)}"
    needed, there = max(peak, weights + cache), memory_of(device)
    note += held
    values = {"peak": peak, "cache": cache, "device": there, "share": share}
    kind = "allocated on the GPU" if device.type == "cuda" else "resident"
    return Result(PASS if needed <= there else FAIL, f"{_gb(peak)} {kind}", f"<= {_gb(there)}", note, values)


def memory_of(device: torch.device) -> int:
    """Bytes: of the GPU, or of the machine, or what its control group allows."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return total if allowed == "max" else min(total, int(allowed))


def _rows(subject: Subject, longest: int, budget: int) -> list[Row]:
    """One aggregation row of `longest` tokens, and search rows that together have `budget` tokens."""
    rollout, worst = subject.config.rollout, subject.worst
    longest, budget = max(2, longest), max(2, budget)
    of_search = min(worst.search_prompt + rollout.search_max_new_tokens, budget)
    return [
        _row(subject, longest, min(max_new_tokens(subject.config, 1), longest - 1), AGGREGATION, 0),
        *(
            _row(subject, of_search, min(rollout.search_max_new_tokens, of_search - 1), SEARCH, index)
            for index in range(budget // of_search)
        ),
    ]


def _row(subject: Subject, length: int, n_sampled: int, level: int, index: int) -> Row:
    """Its first two tokens are of `index` alone: rows that share nothing fill a micro-batch."""
    vocabulary = subject.loaded.causal_lm.config.vocab_size
    tokens = (subject.traces[0].prompt * (length // len(subject.traces[0].prompt) + 1))[:length]
    tokens[:2] = index % vocabulary, index // vocabulary % vocabulary
    prompt, sampled = tokens[: length - n_sampled], tokens[length - n_sampled :]
    logp = np.full(n_sampled, -np.log(vocabulary), np.float32)
    return Row(prompt, sampled, logp, 1.0, 1e-6, level)


def _cache_bytes_per_token(subject: Subject) -> int:
    model = subject.loaded.causal_lm
    heads, size = key_value_shape(model.config)
    return 2 * len(model.get_decoder().layers) * heads * size * torch.finfo(subject.dtype).bits // 8


def start_peak(device: torch.device) -> float:
    """Measure the peak anew from here on, where the system can; returns what is held now, bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM to what is resident now
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> float:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"

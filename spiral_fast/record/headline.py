"""The few numbers of an evaluation that tell most, by name."""

from __future__ import annotations

from typing import Any


def headline(result: dict[str, Any]) -> dict[str, float]:
    """pass@k, majority@k and each step of recursive self-aggregation of one evaluation, by name."""
    numbers = {f"pass@{k}": value for k, value in result.get("pass_at_k", {}).items()}
    numbers |= {f"majority@{k}": value for k, value in result.get("majority_at_k", {}).items()}
    return numbers | {f"RSA step {i}": value for i, value in enumerate(result.get("rsa") or [])}

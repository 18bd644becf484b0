"""Evaluation: how a policy does when inference compute is scaled."""

from spiral_fast.evaluate.run import evaluate

__all__ = ["evaluate"]

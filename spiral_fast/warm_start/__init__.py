"""Supervised warm starts: of a run, and of the built-in model."""

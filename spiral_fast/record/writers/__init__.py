"""Copies of a run's numbers for other viewers."""

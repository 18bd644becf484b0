"""Rollouts by SGLang servers: one of our own, or any number by URL."""

"""Trainer for SPIRAL (Sequential-Parallel-Aggregative Reinforcement Learning, arXiv 2606.23595)."""

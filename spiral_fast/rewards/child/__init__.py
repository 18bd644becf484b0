"""What runs inside a grading process; the trainer starts it with `python -m spiral_fast.rewards.child`."""

"""What a run will need, computed before it is paid for; no GPU, no weights."""

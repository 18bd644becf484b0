"""What a run leaves behind: metrics, traces, evaluations, the report."""

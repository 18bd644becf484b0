"""The embedded rollout engine: continuous batching over the learner's own weights, keys and values in a radix tree."""

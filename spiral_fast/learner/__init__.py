"""The learner: model and adapter, packed forward, the optimiser step, checkpoints."""

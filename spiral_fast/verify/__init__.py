"""`spiral-fast verify`: what must hold for a run's mathematics to be right, checked on the user's model and config."""

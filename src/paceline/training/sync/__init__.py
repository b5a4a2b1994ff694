"""`GradientSync` and its implementations: the `--sync` methods within a training."""

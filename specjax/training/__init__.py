"""Training of drafters: distillation from a target."""

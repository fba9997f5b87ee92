"""Experiments: one file a question. `python -m experiments.run` lists them."""

"""One file a format: what is found there becomes a `WeightSource`. `any_source.py` finds out which it is."""

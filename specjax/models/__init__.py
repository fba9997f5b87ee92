"""The target and draft models: one decoder, its cache and its rotary embedding."""

"""The rules that keep or reject draft tokens."""

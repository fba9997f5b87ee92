"""The `specjax` command. A layer above `specjax.checkpoints`: nothing in the library imports it."""

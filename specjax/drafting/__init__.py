"""Drafters: whatever proposes tokens for the target to verify. One file each, all behind `specjax.drafting.drafter.Drafter`."""

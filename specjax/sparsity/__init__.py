"""What verification leaves out, how that is chosen and calibrated, and what it saves."""

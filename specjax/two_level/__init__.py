"""Lossless sparse verification: a dense pass checks what sparse steps committed."""

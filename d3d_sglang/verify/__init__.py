"""Verification of a block: acceptance, and penalties as in plain decoding. Pure torch, knows no drafter."""

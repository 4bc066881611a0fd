"""Branches: which outcomes of a verification to draft ahead, and which one came true."""

"""Measurements and long comparisons, run from a checkout: `python -m bench.NAME`. Not part of the wheel."""

"""Tests of the project; imported from the root of a checkout."""

"""A test-only plugin that replaces the drafter by a script, so that every accept length occurs on purpose."""

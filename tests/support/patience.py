"""The patience of tests: a limit that only turns a hang into a failure, wide enough for a busy machine."""

PATIENCE_S = 120.0
"""Seconds to wait for something that takes a moment on an idle machine. No test asserts a speed by it."""

"""Benchmarks, trace replay, plots."""

"""Hybrid prefix cache: attention blocks and state checkpoints under one index, in pure Python."""

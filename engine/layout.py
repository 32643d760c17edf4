"""Moved: CacheLayout lives in cache/layout.py (torch-free, wire needs it). Import it from there; do not recreate it here."""

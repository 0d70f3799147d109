"""Lookup engines over rows in RAM: arenas filled from snapshots, one torch call each, and the NumPy reference."""

"""Checkpoints: what training frameworks saved, read without running anything in it."""

"""Measure the CUDA engine on a GPU; `python -m loadtest.gpu` runs the parts (docs/gpu.md)."""

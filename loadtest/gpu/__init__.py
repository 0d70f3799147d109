"""Measure the CUDA engine on a GPU; `python -m loadtest.bench_gpu` runs the parts (docs/gpu.md)."""

"""Proof: workloads, benchmarks and their reports.

Owns how shardrank is measured. Nothing imports it; it may use every other package the way a user would.

ARCHITECTURE.md shows how it works with the other packages.
"""

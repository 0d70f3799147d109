"""Rows in memory: bags, splitting and adding, lookup engines, cards and tiers, generations, the wire.

Owns everything between "these rows of these tables" and "their sums", and what gradients make of rows. Must not know
raw ids, features, requests, scores, or which node owns what: the router tells it which buckets to hold and which rows
to pool.

ARCHITECTURE.md shows how it works with the other packages.
"""

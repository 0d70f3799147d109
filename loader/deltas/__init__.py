"""Changed rows between snapshots: how a trainer publishes them, and what lies in their stream.

`publisher` is what a trainer calls and keeps its stream whole and bounded, `batch` turns float32 rows into the bytes of
one delta. Nothing here knows what applies a delta: that is the shard nodes' work.
See docs/deltas.md.
"""

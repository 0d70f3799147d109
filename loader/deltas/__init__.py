"""Changed rows between snapshots: how a trainer publishes them, and what lies in their stream.

`publisher` is what a trainer calls, `batch` the bytes of one delta, `encoding` turns float32 rows into stored ones,
`stream` keeps one stream whole and bounded. Nothing here knows what applies a delta: that is the shard nodes' work.
See docs/deltas.md.
"""

"""Changed rows between snapshots: how a trainer publishes them, and what lies in their stream. See docs/deltas.md."""

"""A fleet on one machine: shard nodes and serving processes as supervised children. Knows no requests."""

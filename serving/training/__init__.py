"""The demo's trainer: from films that users rated to a model that shardrank serves.

Owns: reading MovieLens 100K, generating interactions with planted tastes, splitting and describing them as features,
training tables and dense part together, exporting them, and measuring quality. Must not know of HTTP, gRPC, lookups
or shard nodes: what it hands over is a snapshot, written by `loader`. Its scores are the reference for served ones, so
it maps ids and pools rows by itself; only the hash function of ids is the router's.
"""

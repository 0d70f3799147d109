"""The trainer of `shardrank train` and `shardrank demo`: from films that users rated to a version in a store.

`interactions` reads MovieLens 100K or generates ratings with planted tastes; `description` says which features and
tables the model has; `dataset` splits the ratings and makes requests of them; `trainer` trains tables and dense part
together; `version` writes the snapshot and measures quality. Knows nothing of HTTP, gRPC, lookups or shard nodes.
"""

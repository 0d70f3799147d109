"""The trainer of `shardrank train` and `shardrank demo`: from films that users rated to a version in a store."""

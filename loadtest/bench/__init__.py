"""Benchmarks of this project's parts, `shardrank loadtest bench NAME`: subjects measured in rounds, in alternation."""

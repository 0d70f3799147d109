"""The registry: what is wanted of a fleet, what is, and the streams of changed rows. A directory, or Redis.

`open_registry` makes one from a URL. `registry` says what each is, `records` what is kept in it and where.
Nothing here knows what a row, a shard node's engine or a ranking model is.
"""

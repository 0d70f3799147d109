"""`shardrank demo`: from ratings to ranked films in one command, measured from outside.

Owns the order of the demo's stages, its clients and its report. Whatever it reports was computed from answers that came
back from the running server, over the same HTTP and gRPC that any client would use. Must not know how training,
serving or a fleet do their work: it calls them as a user would.
"""

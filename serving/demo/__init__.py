"""`shardrank demo`: from ratings to ranked films in one command, measured from outside.

`run` goes through the stages, `ranking` asks the running server over the same HTTP and gRPC as any client, `report`
holds and prints the result.
"""

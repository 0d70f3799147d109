"""`shardrank demo`: `run` goes through the stages, `ranking` asks the running server as any client does."""

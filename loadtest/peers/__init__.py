"""What one would pick instead of shardrank, serving the same model on this machine: `shardrank loadtest peers`."""

"""What a user would pick instead of shardrank, serving the same model on the same machine: `shardrank loadtest peers`.

The other servers (`servers/`) run in environments of their own and know nothing of shardrank; each is started by a
command and asked over its port.
"""

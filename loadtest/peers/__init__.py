"""What a user would pick instead of shardrank, serving the same model on the same machine: `shardrank loadtest peers`.

Owns the other servers (`servers/`, which run in environments of their own and know nothing of shardrank), the model
that all of them serve, and the comparison. Must not know how any server works inside: each is started by a command and
asked over its port.
"""

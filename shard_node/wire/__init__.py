"""The wire between router and shard nodes: frames, messages, connections, the node server and its client."""

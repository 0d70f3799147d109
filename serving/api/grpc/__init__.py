"""The gRPC front: a sans-I/O HTTP/2 connection, a thin asyncio shell around it, and the methods that it serves.

`wire` and `connection` know neither sockets nor gRPC; `listener` knows sockets; `calls` puts gRPC's messages, statuses
and deadlines on streams; `services` says which methods there are.
"""

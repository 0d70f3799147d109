"""The server's end of HTTP/2 (RFC 9113) on asyncio transports: connections, streams, flow control, header blocks.

Knows nothing of gRPC, ranking or metrics: what a stream carries is the business of who makes the streams.
"""

"""The gRPC front, from bytes up: `wire` and `connection` (HTTP/2 without I/O), `listener`, `calls` and `services`."""

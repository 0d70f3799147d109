"""The protobuf messages of the gRPC API, and their generated code.

`shardrank/v1/ranking.proto` is the public API, `inference/open_inference.proto` that of the Open Inference Protocol.
The generated modules beside them are committed; after a change run `scripts/build_protos.py` (needs grpcio-tools
and mypy-protobuf, which the `test` extra brings).
"""

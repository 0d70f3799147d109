"""The protobuf messages of the gRPC API, their generated code, and the command that generates it.

`shardrank/v1/ranking.proto` is the public API, `inference/open_inference.proto` that of the Open Inference Protocol.
The generated modules beside them are committed; after a change run `python -m serving.proto.build` (needs grpcio-tools
and mypy-protobuf, which the `test` extra brings).
"""

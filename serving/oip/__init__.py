"""The Open Inference Protocol v2, over HTTP (`/v2`) and gRPC (`inference.GRPCInferenceService`).

Owns the protocol's forms: tensors by name, the binary tensor extension, metadata, configuration, statistics, the
repository index. Must not know how a request is admitted, batched or ranked: `serving.rank.service` does that, for
all APIs. docs/open-inference-protocol.md describes it.
"""

"""The ranking models: dense parts in torch, from pooled embeddings and dense floats to one logit a candidate.

Must not know of HTTP, gRPC, sockets, batching or files; of a snapshot it knows `ModelSpec` only.
"""

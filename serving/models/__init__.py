"""The ranking models: dense parts in torch, from pooled embeddings and dense floats to one logit a candidate.

Owns: the models' typed configs, how a model's inputs are laid out and assembled from looked-up embeddings, and loading
a dense part from named tensors. Must not know of HTTP, gRPC, sockets, batching or files; of a snapshot it knows
`loader.manifest.ModelSpec` only.
"""

"""From a product's request to scores: HTTP, gRPC and the in-process call, admission, batching, ranking replicas.

Owns the public API in its three forms, its limits and its errors, the ranking models and the processes that serve them.
It asks the router for pooled embeddings and must not know which shard or card holds a row, how rows are stored, or how
ids become rows; of the shard node it uses only bags and generations, and, where rows of this process are on
cards, lanes: they pool straight into a ranking model's input.

One request: `api` (bytes) -> `formats` (a plain request) -> `rank.service.answer` (lease, wait, rank) -> `formats`.

ARCHITECTURE.md shows how it works with the other packages.
"""

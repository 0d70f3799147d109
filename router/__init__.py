"""From a batch's raw ids to its pooled embeddings: id mapping, the plan, fan-out, replica choice, adding up.

Owns who holds what. Must not know HTTP, gRPC, ranking models or candidates' scores; how rows are stored and pooled
is the shard node's.

ARCHITECTURE.md shows how it works with the other packages.
"""

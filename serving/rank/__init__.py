"""From a parsed request to its answer: admission, batches, ranking replicas.

Owns `answer`, the one road of every API: admit, lease a version, parse, rank, encode. Must not know what carried
a call.
"""

"""Rollouts: replacing a model's live version in a fleet, by a plan in the registry that outlives who carries it out.

Owns the plan (`record`, `steps`), what counts as done (`coverage`, `guards`), who carries it out
(`coordinator`), how it is asked for (`requests`) and looked at (`status`). Must not know how a node stages or flips a
version: it only reads what nodes announce.
"""

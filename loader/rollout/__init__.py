"""Rollouts: replacing a model's live version in a fleet, by a plan in the registry that outlives who carries it out.

Nothing here knows how a node stages or flips a version: only what nodes announce is read.
"""

"""Drills: a real fleet of processes is put through swaps, crashes and broken snapshots, and its answers are checked.

Owns the oracle models, whose every answer is known in advance, the load that asks for them at a fixed rate and judges
each answer, the drills themselves and their reports. Must not know how a fleet does what it does: it publishes, starts
rollouts and asks for their status as an operator would, and it believes nothing but the answers.
"""

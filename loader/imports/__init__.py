"""What training systems save, read as checkpoints: one reader for each layout, none of which executes anything.

Imports `loader.checkpoints`, whose `Checkpoint` they all are, and nothing of what takes a checkpoint into a snapshot.
"""

"""What training hands over, as files and as streams, and what a fleet agrees on about it.

Owns the snapshot format with its writer, reader and store, the importers from checkpoints, the registry of versions
and nodes, rollouts, and changed rows. Imports none of the other packages: it does not know who serves a snapshot.

ARCHITECTURE.md shows how it works with the other packages.
"""

"""Snapshots on disk: manifest and layout, row codecs, writer, reader, verification, and publishing into a store."""

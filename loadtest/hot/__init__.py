"""Measure copies of hot rows: which policy holds the right ones, what they cost and save, how even shards are then."""

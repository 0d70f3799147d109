"""What training systems save, read as checkpoints: one reader for each layout, none of which executes anything."""

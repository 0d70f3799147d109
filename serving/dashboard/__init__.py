"""The page for operators: what a fleet is and does, gathered, kept for a while, and shown."""

"""The registry: what is wanted of a fleet, what is, and the streams of changed rows. A directory, or Redis."""

"""Plans before anything is loaded: what a model takes on a fleet, how its tables are divided, what a batch costs."""

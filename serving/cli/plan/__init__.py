"""`shardrank plan`: what a model takes on a node of cards, reckoned without one."""

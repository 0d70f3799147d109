"""Training on a shard node: pushes of gradients, clocks of workers, optimizers of rows, and a log of what was taken.

A node that trains is a parameter server: workers look rows up as routers do, and push gradients.
"""

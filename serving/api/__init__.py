"""The ways in over the network: HTTP behind a gate of our own, the port for operators, and who may connect."""

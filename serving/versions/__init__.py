"""Loads and checks versions of models, says which one answers a request, and follows what a fleet wants."""

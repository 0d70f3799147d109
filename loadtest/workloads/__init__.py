"""Workloads: what load tests ask for, and models to serve it."""

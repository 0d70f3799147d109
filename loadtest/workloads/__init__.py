"""Workloads: what a load test asks.

Owns the models that are asked, how many candidates a request has, which ids are in it, its bytes in every API, and
snapshots of random rows for the models that nobody trains. Must not know when requests are sent, by whom, or how long
they take: that is `loadtest.load`.
"""

"""Workloads: the models that are asked, what a request has in it, its bytes in every API, and snapshots to serve.

Must not know when requests are sent, by whom, or how long they take: that is `loadtest.load`.
"""

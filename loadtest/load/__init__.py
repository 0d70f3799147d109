"""The open-loop load generator: asks a server at a given rate from processes of its own, and says what it measured.

Must not know what is asked: `loadtest.workloads` makes the requests.
"""

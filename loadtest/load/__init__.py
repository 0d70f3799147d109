"""The open-loop load generator: asks a server at a given rate from processes of its own, and says what it measured.

Owns arrival times, sending over HTTP and gRPC, the recording of latencies, the result's form, the search for the
highest rate, and `shardrank loadtest run`. Must not know what is asked (`loadtest.workloads` makes the requests) nor
how a result looks on a page (`loadtest.report`).
"""

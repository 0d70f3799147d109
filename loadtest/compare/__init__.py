"""The same load on rows in the serving process, on several cards, and in shard processes, as ratios to the first.

Servers are started as users do, by their command line. Requests are `loadtest.load`'s, ratios `loadtest.report`'s.
"""

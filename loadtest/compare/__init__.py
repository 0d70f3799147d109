"""The same load on several numbers of cards and shards, interleaved in one run, as ratios to the first.

Servers are started as users do, by their command line. Requests are `loadtest.load`'s, ratios `loadtest.report`'s.
"""

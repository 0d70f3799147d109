"""The same load on several numbers of cards and shards, interleaved in one run, as ratios to the first.

Owns: which arms there are, the server of each, and the order in which they are measured. Starts servers as users do,
by their command line; it must not know how one serves. Requests are `loadtest.load`'s, ratios `loadtest.report`'s.
"""

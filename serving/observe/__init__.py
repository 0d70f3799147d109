"""What a serving process tells of itself: metrics, statistics of versions, readiness.

Owns the one record of times that every call and every batch leaves, and all that is made of it. Must not know how
requests are read or ranked.
"""

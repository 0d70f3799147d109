"""`drill hostile`: what strangers may send, against a server that serves valid clients beside it.

Owns the attacks, the processes that run them, the valid clients and probes beside them, and the verdict. Knows a server
only by its sockets, the memory of its process and its log, so that the same drill runs against any release.
"""

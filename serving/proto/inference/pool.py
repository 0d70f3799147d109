"""The descriptor pool of the `inference` messages.

Every client and server of the Open Inference Protocol brings messages of these names, each in a file of its own, and a
pool refuses a name that comes from two files. With a pool of their own, ours can be in a process beside any other.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()

"""The messages of the Open Inference Protocol v2.

Every client and server of the protocol brings messages of these names, each in a file of its own, and a descriptor pool
refuses a name that comes from two files. With a pool of their own, ours can be in a process beside any other.
"""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()

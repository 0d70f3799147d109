"""The messages of the Open Inference Protocol v2, in a descriptor pool of their own (see `pool`)."""

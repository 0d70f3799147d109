"""A fleet on one machine: shard nodes and serving processes as supervised children.

Owns starting, watching, restarting and stopping processes, and knowing from their own endpoints when they are ready.
Must not know what a request or a model is: it starts command lines and asks whether they answer.
"""

"""What serving a request costs beyond computing it: the parts of `python -m loadtest.bench_serving`.

Owns the models that are served for it, the client that always has the same number of requests in flight, the same
batches computed without a server, and the comparison. Must not know how a server works inside: it is started by its
command line, asked over its ports, and weighed by the operating system.
"""

"""What serving a request costs beyond computing it: the parts of `python -m loadtest.bench_serving`.

Must not know how a server works inside: it is started by its command line, asked over its ports, and weighed by the
operating system.
"""

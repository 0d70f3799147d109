"""The command line: `shardrank` and its commands, one file for each group of them.

Owns flags, help, what is printed and exit codes. Must not do the work itself: each command reads its flags, calls the
package that owns the work, and prints what came. Heavy imports (torch, grpc) are made inside commands, so that
`shardrank --help` is quick.
"""

from serving.cli.group import main

__all__ = ["main"]

"""Drills: a real fleet of processes is put through swaps, crashes and broken snapshots, and its answers are checked.

They must not know how a fleet does what it does: they publish, start rollouts and read their status as an operator
would, and believe nothing but the answers.
"""

from __future__ import annotations

import click

from serving.cli import LazyGroup

DRILLS = ("swap", "crash", "broken", "upgrade", "restart", "soak", "grey", "overload")


@click.group(cls=LazyGroup, modules=dict.fromkeys(DRILLS, "loadtest.drill.config"))
def drill() -> None:
    """Put a real fleet through swaps, crashes, hangs, broken snapshots, upgrades, restarts, or a server under overload.

    In all but `overload` a fleet serves oracle models: every row has 1.0 in dimension 0 in version A and 1024.0 in
    version B, so a bag of n ids must answer exactly n or 1024 n, and its score tells which dense model made it. A load
    asks over HTTP and gRPC, in all but `upgrade` at a fixed rate and from a process of its own, and checks every
    answer. Exit code 1 if anything was not as it must be.

    Examples:
      shardrank drill swap --swaps 100 --json swap.json
      shardrank drill crash --help
    """

"""A process that closes its node ends cleanly, however soon: freeing rows must not race the interpreter's end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardrank_testing.snapshots import make_spec, write_snapshot

# Each child goes its way to the interpreter's end; the parent, which only loads the modules, waits for all.
PROGRAM = """
import os
import sys
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.engine.loading import load_tables
from shard_node.node import ShardNode

for _ in range(5):
    if not os.fork():
        break
    _, status = os.wait()
    if status:
        sys.exit(f"a child ended with {os.waitstatus_to_exitcode(status)}")
else:
    print("5 ended")
    sys.exit()

snapshot = Snapshot.open(sys.argv[1])
plan = Plan.make(snapshot.spec, sharding="table", cards_per_shard=4)
node = ShardNode(plan.identity(0))
for version in range(1, 20):
    node.stage("films", version, load_tables(snapshot, plan.partition(0), plan.digest))
node.close()
"""


@pytest.mark.nightly
def test_closing_a_node_at_the_end_of_a_process_never_aborts(tmp_path: Path):
    path, _ = write_snapshot(tmp_path, make_spec(), seed=1)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 ended\n", "")

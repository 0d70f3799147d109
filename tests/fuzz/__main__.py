"""Fuzz decoders, guided by coverage: `python -m tests.fuzz [TARGET ...] --seconds N`. Needs atheris: CONTRIBUTING.md.

What a decoder should refuse, and does not, ends the run: it is written to `crash-...` in the current folder.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
with atheris.instrument_imports(["loader", "shard_node", "router", "serving"]):
    from shardrank_testing.fuzzing import TARGETS

FLAGS = ["-max_len=16384", "-timeout=10", "-rss_limit_mb=4096", "-print_final_stats=1"]


def main() -> None:
    """Fuzz one target here, or each of several in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target, at most")
    parser.add_argument("--executions", type=int, default=-1, help="of each target, at most")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"{min(unknown)} is none of {', '.join(TARGETS)}")
    if len(names) > 1:
        limits = [f"--seconds={options.seconds}", f"--executions={options.executions}"]
        commands = ([sys.executable, "-m", "tests.fuzz", name, *limits] for name in names)
        sys.exit(max(subprocess.run(command, check=False).returncode for command in commands))
    logging.disable()
    target = TARGETS[names[0]]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        limits = [f"-max_total_time={options.seconds}", f"-runs={options.executions}"]
        atheris.Setup([names[0], *FLAGS, *limits, corpus], target.check_costs)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""One attack, in a process of its own on one core.

`python -m loadtest.drill.hostile.attack_process CONFIG` with a file that holds an `AttackConfig` as JSON. Its one
line on stdout is a `Tally`.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from loadtest.drill.hostile.attacker import AttackConfig, Attacker
from loadtest.drill.hostile.catalog import attack_named
from serving.fleet.process import PARENT_PID_VARIABLE, die_with_parent


def child_environment() -> dict[str, str]:
    """Of a process that ends when this one ends."""
    return {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}


def main(arguments: list[str]) -> None:
    """The program."""
    die_with_parent(os.environ)
    config = AttackConfig.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    if config.core is not None:
        os.sched_setaffinity(0, {config.core})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attacker = Attacker(config)
    attack_named(config.name).run(attacker)
    sys.stdout.write(attacker.done().model_dump_json() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

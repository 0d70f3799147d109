"""`python -m tests.simulation`: run one seed, or as many as there is time for."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--verbose", action="store_true", help="print what happens, and what processes log")
    parser.add_argument("--seeds", type=int, default=1000, help="how many at most")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long at most")
    parser.add_argument("--at-least", type=int, default=0, help="how many however long it takes")
    parser.add_argument("--twice", action="store_true", help="run each twice, and compare what happened")
    parser.add_argument("--shrink-s", type=float, default=60.0, help="how long a failing one may be made simpler")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run. Return 1 if a rule was broken."""
    from tests.simulation import runner
    from tests.simulation.scenario import draw

    options = parse(arguments)
    # What a killed process left is collected when no loop runs: its coroutines complain, and nobody need know.
    sys.unraisablehook = lambda unraisable: None
    if options.seed is not None:
        outcome, seed = runner.run(draw(options.seed), verbose=options.verbose), options.seed
        failed: runner.Outcome | None = outcome if outcome.rule else None
        count = 1
    else:
        until = time.monotonic() + 60.0 * options.minutes
        seeds = itertools.islice(itertools.count(options.first), options.seeds)
        count, failed, seed = runner.run_many(
            seeds, lambda count: count < options.at_least or time.monotonic() < until, twice=options.twice
        )
    print(f"{count} seeds, {'one of which breaks a rule' if failed else 'all rules held'}")  # noqa: T201
    if failed is None:
        return 0
    print(runner.report(failed, seed))  # noqa: T201
    if options.shrink_s and not options.verbose:
        print("\nsimpler:\n" + runner.report(runner.shrink(failed, options.shrink_s), seed))  # noqa: T201
    return 1


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have the same order each time, so that a seed is replayed exactly.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))

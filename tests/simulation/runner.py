"""Runs seeds, and makes a failing one small."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tests.simulation.history import ViolationError
from tests.simulation.loop import PROCESS, StuckError
from tests.simulation.scenario import Scenario, draw
from tests.simulation.world import World

COLLECT_EVERY = 20
TRACE_LINES = 40


class Outcome(NamedTuple):
    """How a scenario ended. `rule` is "" if all held."""

    rule: str
    text: str
    world: World


def run(scenario: Scenario, *, verbose: bool = False) -> Outcome:
    """Run a scenario."""
    world, root = World(scenario, verbose=verbose), logging.getLogger()
    handler, level = logging.Handler(), root.level
    setattr(handler, "emit", partial(_note, world))  # noqa: B010
    logging.disable(logging.NOTSET if verbose else logging.CRITICAL)
    if verbose:
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    try:
        world.loop.run(world.main())
    except ViolationError as violation:
        world.note("", f"BROKEN: {violation}")
        return Outcome(violation.rule, str(violation), world)
    except StuckError as error:
        return Outcome("stuck", str(error), world)
    except Exception as error:
        return Outcome("unforeseen error", repr(error), world)
    finally:
        logging.disable(logging.NOTSET)
        root.removeHandler(handler)
        root.setLevel(level)
    return Outcome("", "", world)


def _note(world: World, record: logging.LogRecord) -> None:
    process = PROCESS.get()
    world.note("" if process is None else process.name, f"[{record.levelname}] {record.getMessage()}")


def run_many(
    seeds: Iterator[int], go_on: Callable[[int], bool], *, twice: bool = False
) -> tuple[int, Outcome | None, int]:
    """Run seeds one after the other until one fails, or `go_on` says no of how many there were.

    With `twice` each is run again, and fails if something else happens.
    Returns how many there were, and the outcome that failed with its seed.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    count = 0
    try:
        for seed in seeds:
            outcome = run(draw(seed))
            if twice and (again := run(draw(seed))).world.trace != outcome.world.trace:
                outcome = Outcome("not replayed", _difference(outcome, again), again.world)
            count += 1
            if outcome.rule:
                return count, outcome, seed
            if count % COLLECT_EVERY == 0:
                gc.collect()
            if not go_on(count):
                break
    finally:
        gc.collect()
        gc.enable()
        gc.unfreeze()
    return count, None, 0


def _difference(one: Outcome, other: Outcome) -> str:
    pairs = zip(one.world.trace, other.world.trace, strict=False)
    return next((f"{before} became {after}" for before, after in pairs if before != after), "one of them is longer")


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Return what may be simpler: without one of its events, then with fewer processes and less that goes wrong."""
    for index in reversed(range(len(scenario.events))):
        yield replace(scenario, events=scenario.events[:index] + scenario.events[index + 1 :])
    least = Scenario(0, num_shards=1, replicas=max(1, scenario.replicas - 1), serving=1, lag_s=0.0)
    for name in ("publishers", "coordinators", "serving", "num_shards", "replicas", "loss", "duplicates", "lag_s"):
        changed = replace(scenario, **{name: getattr(least, name)})
        if changed != scenario:
            names = changed.processes()
            known = dict(zip(scenario.processes(), scenario.skews_s, strict=True))
            involved = {str(part) for event in changed.events for part in event.what}
            if not involved & (set(scenario.processes()) - set(names)):
                yield replace(changed, skews_s=tuple(known[name] for name in names))
    for index, skew_s in enumerate(scenario.skews_s):
        if skew_s:
            yield replace(scenario, skews_s=(*scenario.skews_s[:index], 0.0, *scenario.skews_s[index + 1 :]))


def shrink(failed: Outcome, seconds: float) -> Outcome:
    """Return the simplest scenario that was found in so many seconds to break the same rule."""
    until, candidates = time.monotonic() + seconds, smaller(failed.world.scenario)
    while (scenario := next(candidates, None)) is not None and time.monotonic() < until:
        outcome = run(scenario)
        if outcome.rule == failed.rule:
            failed, candidates = outcome, smaller(outcome.world.scenario)
    return failed


def report(failed: Outcome, seed: int) -> str:
    """Return what was found, in a page."""
    scenario, world = failed.world.scenario, failed.world
    fleet = (f"{name} {value}" for name, value in vars(scenario).items() if name not in ("seed", "events"))
    lines = [f"seed {seed}: {failed.text}", "", ", ".join(fleet), *(f"  {event}" for event in scenario.events), ""]
    trace = [entry for entry in world.trace if " is delta " not in entry[2]]
    lines += [f"{at:9.3f} {who:14} {text}"[:240] for at, who, text in trace[-TRACE_LINES:]]
    return "\n".join([*lines, "", f"python -m tests.simulation --seed {seed} --verbose"])

"""What a seed draws: the fleet, what its operators, trainers and clients do, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.simulation.model import FEW_KEYS, KEYS

FAULTS_UNTIL_S = 40.0
MOMENTS = {"crash": ("flip", "roll:1"), "failover": ("dense", "flip"), "clock": ("bake", "canary")}
"""When some faults matter most: a step of a rollout, or of dense weights, has just begun."""


@dataclass(frozen=True)
class Event:
    """Something that happens at a time, or at the first `moment` after it, for a while."""

    at_s: float
    kind: str
    what: tuple[Any, ...] = ()
    lasts_s: float = 0.0
    moment: str = ""

    def __str__(self) -> str:
        lasts, moment = f" for {self.lasts_s:.1f} s" if self.lasts_s else "", self.moment and f" {self.moment}:"
        return f"{self.at_s:6.1f}{moment} {self.kind} {' '.join(map(str, self.what))}{lasts}"


@dataclass(frozen=True)
class Scenario:
    """A fleet and its events. The order of events of one moment is that of the list."""

    seed: int
    num_shards: int = 2
    replicas: int = 2
    serving: int = 2
    coordinators: int = 1
    publishers: tuple[int, ...] = (1,)
    files: bool = False
    min_replicas: int = 0
    lag_s: float = 0.1
    loss: float = 0.0
    duplicates: float = 0.0
    memory_versions: int = 2
    load_s: float = 0.05
    pause_s: float = 0.8
    train_until_s: float = 1000.0
    capacity: int = len(KEYS)
    skews_s: tuple[float, ...] = ()
    events: tuple[Event, ...] = ()

    def processes(self) -> list[str]:
        """Return the names of all processes."""
        nodes = [f"shard-{shard}-{one}" for shard in range(self.num_shards) for one in range(self.replicas)]
        serving = [f"serve-{one}" for one in range(self.serving)]
        coordinators = [f"coordinator-{one}" for one in range(self.coordinators)]
        return [*nodes, *serving, *coordinators, *(f"trainer-{one}" for one in range(len(self.publishers)))]


def draw(seed: int) -> Scenario:
    """Draw a scenario."""
    random = Random(seed)
    files = random.random() < 0.15
    scenario = Scenario(
        seed=seed,
        num_shards=random.choice((1, 2, 2)),
        replicas=random.choice((1, 2, 2, 2, 3)),
        serving=random.choice((1, 2, 2)),
        coordinators=random.choice((1, 1, 2)),
        publishers=random.choice(((1,), (1,), (1, 1), (1, 1), (1, 3))),
        files=files,
        min_replicas=0 if files else random.choice((0, 1)),
        lag_s=random.choice((0.0, 0.05, 1.0, 2.5)),
        loss=random.choice((0.0, 0.0, 0.01, 0.05)),
        duplicates=random.choice((0.0, 0.01)),
        memory_versions=random.choice((1, 2, 3)),
        load_s=random.choice((0.05, 4.0)),
        pause_s=random.choice((0.8, 0.8, 0.4, 6.0)),
        train_until_s=random.choice((25.0, 45.0, 1000.0)),
    )
    names = scenario.processes()
    skews_s = tuple(0.0 if files else random.choice((0.0, 0.0, 0.5, -0.5, 3600.0, -3600.0)) for _ in names)
    events = _rollouts(random, scenario)
    events += _faults(random, scenario, names, [event.at_s for event in events if event.kind == "rollout"])
    capacity = random.choice((FEW_KEYS, *[len(KEYS)] * 4))
    if capacity == FEW_KEYS:
        # Where too few have room, a snapshot with more is rolled out.
        strategy = "by-replica" if scenario.replicas > 1 else "beside"
        events.append(Event(random.uniform(20.0, FAULTS_UNTIL_S), "rollout", (4, None, 0.0, strategy)))
    in_order = tuple(sorted(events, key=lambda event: event.at_s))
    return replace(scenario, skews_s=skews_s, events=in_order, capacity=capacity)


def _rollouts(random: Random, scenario: Scenario) -> list[Event]:
    events, at_s = [], random.uniform(3.0, 12.0)
    while at_s < FAULTS_UNTIL_S:
        version = random.choice((2, 2, 3, 3, 4, 4, 5, 6, 7, 1))
        share = 0.5 if version == 6 else random.choice((None, 0.5))
        bake_s = random.choice((4.0, 8.0)) if version == 6 or share else random.choice((0.0, 4.0))
        strategy = "by-replica" if scenario.replicas > 1 and random.random() < 0.4 else "beside"
        if scenario.memory_versions == 1:
            strategy = "by-replica" if scenario.replicas > 1 else "beside"
        events.append(Event(at_s, "rollout", (version, share, bake_s, strategy)))
        if random.random() < 0.25:
            events.append(Event(at_s + random.uniform(0.5, 25.0), random.choice(("abort", "roll_back"))))
        if random.random() < 0.4:
            named_s = at_s + random.uniform(4.0, 10.0)
            # Some take long, so that a version goes meanwhile; their rows are in the last shard.
            nodes = [f"shard-{scenario.num_shards - 1}-{one}" for one in range(scenario.replicas)]
            slow = nodes * random.randint(0, 1)
            events += [Event(named_s, "slow", (name, 0.4 / scenario.replicas), 25.0) for name in slow]
            events.append(Event(named_s, "name_versions", (version,), 25.0))
        at_s += random.uniform(15.0, 40.0)
    return events


def _faults(random: Random, scenario: Scenario, names: list[str], rollouts_s: list[float]) -> list[Event]:
    events = []
    nodes = [name for name in names if name.startswith("shard")]
    kinds = ["crash"] * 5 + ["partition"] * 3 + ["slow", "slow", "clock", "clock", "disk", "disk"]
    kinds += ["power", "power", "registry_disk"] if scenario.files else ["failover"] * 4 + ["registry_down"]
    for _ in range(random.choice((0, 0, 1, 2, 3, 4, 6))):
        at_s, lasts_s = random.uniform(5.0, FAULTS_UNTIL_S), random.choice((0.5, 2.0, 5.0, 12.0))
        if random.random() < 0.5:
            at_s = random.choice(rollouts_s) + random.uniform(0.0, 25.0)
        kind, name = random.choice(kinds), random.choice(names)
        moment = random.choice(MOMENTS[kind]) if kind in MOMENTS and random.random() < 0.3 else ""
        what: tuple[Any, ...] = (name,)
        if kind == "crash":
            # The first replica is the first to have a new version.
            name = random.choice((name, random.choice(nodes), random.choice(nodes[:: scenario.replicas])))
            what, lasts_s = (name,), random.choice((0.3, 3.0, 8.0, 15.0))
        elif kind == "slow":
            name = random.choice([one for one in names if one.startswith(("shard", "serve"))])
            what, lasts_s = (name, random.choice((0.1, 0.25, 0.4))), 25.0
        elif kind == "partition":
            other = random.choice([*(other for other in names if other != name), "registry", "registry"])
            what = (name, other, random.choice(("both", "to", "from")))
        elif kind == "clock":
            name = random.choice((name, "coordinator-0"))
            what, lasts_s = (name, random.choice((-3600.0, -2.0, 2.0, 60.0, 3600.0))), 0.0
            if scenario.files:
                continue
        elif kind == "disk":
            what = (random.choice([*nodes, *(one for one in names if one.startswith("serve"))]),)
            what = (*what, random.choice(("EIO", "ESTALE", "ENOENT")))
            lasts_s = random.choice((2.0, 8.0, 15.0))
        elif kind == "failover":
            what, lasts_s = (random.choice((0.0, 0.5, 2.0)),), 0.0
        elif kind in ("registry_down", "registry_disk", "power"):
            what = ()
        events.append(Event(at_s, kind, what, lasts_s, moment))
    return events

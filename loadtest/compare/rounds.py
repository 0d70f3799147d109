"""Measures every arm in every round, one after the other.

Each time an arm's server is started anew. So what differs from one start to the next (which memory the kernel gives,
which core a thread begins on) is in the rounds, over which confidence intervals are drawn, and not frozen in a ratio;
there is a cold measure in every round; and an arm never shares memory and cores with the servers of the others.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtest.compare.agreement import ArmScores, check_agreement, largest_difference
from loadtest.compare.arm_commands import Ports
from loadtest.compare.arm_measure import ArmMeasure, ArmRound
from loadtest.compare.arm_server import HOST, free_ports
from loadtest.compare.config import Arm, CompareConfig, Dtype, order_of_round
from loadtest.load.config import LoadConfig
from loadtest.load.processes import running_generators
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.workloads.payloads import GRPC_APIS, Api

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all arms answered alike.

    Attributes:
        requests: that each was asked.
        dtype: that the dense model is computed in.
        largest_difference: between the first arm's scores and any other's.
    """

    requests: int
    dtype: Dtype
    largest_difference: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured.

    Attributes:
        rounds: of each arm, in the order of the table.
        agreed: scores of the first round.
    """

    rounds: dict[Arm, list[ArmRound]]
    agreed: Agreed


def target_of(api: Api, ports: Ports) -> str:
    """Where requests of an API go."""
    return f"grpc://{HOST}:{ports.grpc}" if api in GRPC_APIS else f"http://{HOST}:{ports.http}"


async def measure_rounds(
    config: CompareConfig, load: LoadConfig, snapshot: Path, folder: Path, console: Console, say: Say
) -> Measurements:
    """Measures all rounds.

    Before the first one the first arm's server is started and asked once, and that is thrown away: what the first
    start on a machine pays, reading files from the disk for example, would be in one arm alone.

    Args:
        config: arms and rounds.
        load: what to ask; its target is of no account.
        snapshot: what is served.
        folder: for logs and registries.
        console: for the live line.
        say: told what is measured.

    Raises:
        CompareError: a server ended, or did not get ready; arms disagree; or hosts can't be made.
        HelperProcessError: the process that keeps servers busy ended, or a request of its failed.
        LoadError: a load can't be run to its end.
    """
    ports = free_ports(random.Random())
    asked = load.model_copy(update={"target": target_of(load.spoken, ports)})
    found: dict[Arm, list[ArmRound]] = {arm: [] for arm in config.arms}
    scores: dict[Arm, ArmScores] = {}

    def agree(arm: Arm, answered: ArmScores) -> None:
        scores[arm] = answered
        check_agreement(config.arms[0], scores[config.arms[0]], arm, answered)

    async with contextlib.AsyncExitStack() as stack:
        generators = await stack.enter_async_context(running_generators(asked))
        client = stack.enter_context(HelperProcess("loadtest.compare.closed_process", asked))
        measure = ArmMeasure(config, generators, client, snapshot, ports, folder, console)
        stack.push_async_callback(measure.settle)
        say(f"rehearsal: {config.arms[0].name}")
        await measure.rehearse(config.arms[0])
        for number in range(config.rounds):
            for index in order_of_round(len(config.arms), number):
                arm = config.arms[index]
                say(f"round {number + 1} of {config.rounds}: {arm.name}")
                found[arm].append(await measure.arm(arm, number, partial(agree, arm) if number == 0 else None))
    first = scores[config.arms[0]]
    return Measurements(found, Agreed(len(first.scores), first.dtype, largest_difference(list(scores.values()))))

"""A serving process as a member of a fleet: it discovers shard nodes, does what is wanted, and tells what it is."""

from __future__ import annotations

import asyncio
import logging
import random as random_module
import time
from collections.abc import Callable, Sequence

from loader.errors import RegistryError
from loader.registry.records import WantedModel
from loader.registry.typed import FleetRegistry
from router.replica_directory import ReplicaDirectory
from serving.rank.service import RankingService
from serving.serving_agent import LocalRows, ServingActions, ServingConfig
from shard_node.agent import Agent, AgentConfig, Sleep

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks at which nodes there are; each is up to a quarter earlier or later."""
LIVE_POLL_S = 0.05


class ServingNode:
    """Runs until `leave`. Belongs to one event loop, that of the agent and the registry.

    Args:
        fleet: the registry; closed by `leave`.
        service: what answers requests. If no models are named in `agent_config`, those that are wanted at the start are
            the ones without which the process is not ready.
        config: of the process.
        agent_config: intervals, limits, and which models.
        local: rows in this process; None if they are on shard nodes.
        clock: monotonic seconds.
        sleep: waits.
        random: for jitter.

    Attributes:
        directory: the shard nodes of the fleet.
        actions: what the agent has done.
        agent: makes the process what is wanted of it.
    """

    def __init__(
        self,
        fleet: FleetRegistry,
        service: RankingService,
        config: ServingConfig,
        agent_config: AgentConfig | None = None,
        local: LocalRows | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        random: random_module.Random | None = None,
    ) -> None:
        agent_config = agent_config or AgentConfig()
        self._fleet = fleet
        self._service = service
        self._models = agent_config.models
        self._local = local
        self._sleep = sleep
        self._random = random or random_module.Random()
        self.directory = ReplicaDirectory(clock)
        self.actions = ServingActions(service, fleet, self.directory, config, local, sleep)
        self.agent = Agent(fleet, self.actions, agent_config, clock, sleep, self._random)
        self._tasks: list[asyncio.Task[None]] = []

    async def load(self) -> None:
        """Begins, and returns once each expected model is live. The process is in the fleet until `leave`."""
        self._tasks = [
            asyncio.create_task(self._watch_nodes(), name="watch nodes"),
            asyncio.create_task(self.agent.run(), name="agent"),
        ]
        while not self._is_live():
            await self._sleep(LIVE_POLL_S)

    async def leave(self) -> None:
        """Tells the fleet that the process ends, and that it is not ready any more. What it serves stays live.

        A registry that is down does not keep it from leaving.
        """
        self._service.begin_shutdown()
        if self._tasks:
            await self.agent.leave()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        if self._local is not None:
            await self._local.actions.close()
        await self._fleet.registry.close()

    def _is_live(self) -> bool:
        """Whether each expected model has a live version."""
        expected = self._models or _with_live(list(self.agent.wanted.values()))
        if not expected:
            return False
        self._service.expect(expected)
        live = self._service.versions.live_versions()
        return all(model in live for model in expected)

    async def _watch_nodes(self) -> None:
        if self._local is not None:
            return
        is_silent = False
        while True:
            try:
                self.directory.update(await self._fleet.nodes())
            except RegistryError as error:
                if not is_silent:
                    logger.warning("nodes are those that are known: %s", error)
                is_silent = True
            except Exception:  # a fault of ours must not leave this process with the nodes of today for good
                if not is_silent:
                    logger.exception("looking for nodes failed; they are those that are known")
                is_silent = True
            else:
                is_silent = False
            await self._sleep(LOOK_S * self._random.uniform(0.75, 1.25))


def _with_live(wanted: Sequence[WantedModel]) -> tuple[str, ...]:
    return tuple(sorted(one.model for one in wanted if one.live is not None))

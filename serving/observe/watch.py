"""Is this process ready, and what do its shards tell? Asked in the background, so that a probe costs nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from loader.errors import ShardrankError
from serving.observe.collectors import ReportedNode, degraded_reason
from shard_node.card_watch import ENOUGH_FAULTS
from shard_node.errors import CardError, GenerationNotFoundError
from shard_node.generation import Generations
from shard_node.node import NodeInfo

if TYPE_CHECKING:
    from serving.versions.served_model import ServedModel

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 1.0


class NodeWatch:
    """Keeps what the shards of every live model last said.

    Args:
        generations: of the serving process.
        expected_models: models that must be live before the process is ready; None if that is not known yet.
        max_staleness_s: by model, how old the newest change may be that a shard lacks.
        wall_clock: seconds since the epoch.

    Raises:
        ValueError: for a limit of staleness that is not above 0.
    """

    def __init__(
        self,
        generations: Generations[ServedModel],
        expected_models: Sequence[str] | None,
        max_staleness_s: Mapping[str, float] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        for model, limit_s in (max_staleness_s or {}).items():
            if not limit_s > 0:
                raise ValueError(f"max_staleness_s of model {model!r} is {limit_s}, which is not above 0")
        self._max_staleness_s = dict(max_staleness_s or {})
        self._wall_clock = wall_clock
        self._generations = generations
        self._expected = None if expected_models is None else tuple(expected_models)
        self._nodes: dict[str, tuple[tuple[str, NodeInfo], ...]] = {}
        self._problems: dict[str, str] = {}
        self._asked: frozenset[str] = frozenset()
        self._shutting_down = False
        self._faults: dict[str, int] = {}
        self._card_error: CardError | None = None
        self._cards_failed = asyncio.Event()

    def nodes(self) -> list[ReportedNode]:
        """What the shards of all models last said."""
        return [
            ReportedNode(model, replica, info) for model, told in list(self._nodes.items()) for replica, info in told
        ]

    def problems(self) -> dict[str, str]:
        """Why the process is not ready, by model ("" for the process itself); empty if it is ready."""
        if self._card_error is not None:
            return {"": f"{self._card_error.kind}: {self._card_error}"}
        if self._shutting_down:
            return {"": "the process is shutting down"}
        if self._expected is None:
            return {"": "it is not known yet which models are wanted"}
        live = self._generations.models()
        missing = {model: "no live version" for model in self._expected if model not in live}
        # A model that comes later has had its golden requests answered by its shards; it does not make what serves
        # already not ready.
        awaited = (model for model in self._expected if model in live and model not in self._asked)
        unasked = dict.fromkeys(awaited, "its shards were not asked yet")
        return missing | unasked | self._problems

    def degraded(self) -> dict[str, str]:
        """Why the rows of a live version are older than `max_staleness_s` allows, by model; empty if none are.

        Such a process is ready: it answers, from rows that lag behind.
        """
        live = self._generations.live_versions()
        reasons: dict[str, str] = {}
        for model, limit_s in self._max_staleness_s.items():
            told = [
                one
                for _, info in self._nodes.get(model, ())
                for one in info.versions
                if (one.model, one.version) == (model, live.get(model))
            ]
            if told and (reason := degraded_reason(told, limit_s, self._wall_clock())):
                reasons[model] = reason
        return reasons

    def expect(self, models: Sequence[str]) -> None:
        """Says which models must be live before the process is ready."""
        self._expected = tuple(models)

    def begin_shutdown(self) -> None:
        """Not ready from now on."""
        self._shutting_down = True

    async def refresh(self) -> None:
        """Asks the shards of every live model once."""
        models = self._generations.models()
        await asyncio.gather(*(self._refresh(model) for model in models))
        self._asked = frozenset(models)
        for gone in set(self._nodes) - set(models):
            del self._nodes[gone]
        for gone in set(self._problems) - set(models):
            del self._problems[gone]
        for gone in set(self._faults) - set(models):
            del self._faults[gone]

    async def cards_failed(self) -> NoReturn:
        """Waits until cards of this process have failed. Only a new process can use them again.

        Raises:
            CardError: what they fail with.
        """
        await self._cards_failed.wait()
        raise self._card_error or CardError("the cards have failed")

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _refresh(self, model: str) -> None:
        try:
            with self._generations.lease(model) as lease:
                nodes = await lease.payload.nodes()
        except GenerationNotFoundError:
            return
        except ShardrankError as error:
            if model not in self._problems:
                logger.warning("model %r is not ready: %s", model, error)
            self._problems[model] = f"{error.kind}: {error}"
            self._count_fault(model, error)
            return
        except Exception as error:
            # A defect of one model must neither stop the watch over the others, nor pass for readiness.
            logger.exception("asking the shards of model %r failed", model)
            self._problems[model] = f"internal: asking its shards failed with {type(error).__name__}"
            return
        self._nodes[model] = tuple(nodes)
        self._faults.pop(model, None)
        if self._problems.pop(model, None) is not None:
            logger.info("model %r is ready again", model)

    def _count_fault(self, model: str, error: ShardrankError) -> None:
        # Only cards of this process: of those of shard nodes a router makes other errors.
        self._faults[model] = self._faults.get(model, 0) + 1 if isinstance(error, CardError) else 0
        if isinstance(error, CardError) and self._faults[model] >= ENOUGH_FAULTS and self._card_error is None:
            logger.critical("the cards of this process have failed: %s", error)
            self._card_error = error
            self._cards_failed.set()

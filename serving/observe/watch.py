"""Is this process ready, and what do its shards tell? Asked in the background, so that a probe costs nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from loader.errors import ShardrankError
from shard_node.agent.node_agent import ENOUGH_FAULTS
from shard_node.errors import CardError, GenerationNotFoundError
from shard_node.generation import Generations
from shard_node.node import NodeInfo, ServedVersion

if TYPE_CHECKING:
    from serving.versions.served_model import ServedModel

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 1.0


class _Told(NamedTuple):
    """What one model's shards last said: their nodes by address, else what is wrong; how often in turn cards failed."""

    nodes: Sequence[tuple[str, NodeInfo]] = ()
    problem: str = ""
    faults: int = 0


class NodeWatch:
    """Keeps what the shards of every live model last said.

    Arguments are those of `RankingService`. Raises ValueError for a limit of staleness that is not above 0.
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
        self.wall_clock = wall_clock
        self._max_staleness_s = dict(max_staleness_s or {})
        self._generations = generations
        self._expected = None if expected_models is None else tuple(expected_models)
        # By model, once that was asked. Replaced as a whole: metrics read it on another thread.
        self._told: dict[str, _Told] = {}
        self._shutting_down = False
        self._card_error: CardError | None = None
        self._cards_failed = asyncio.Event()

    def nodes(self) -> list[tuple[str, str, NodeInfo]]:
        """What the nodes of all shards last said: of which model, the node's address (`local` here), and what.

        A node may hold other models too; these are told by those who ask for them.
        """
        return [(model, address, info) for model, told in self._told.items() for address, info in told.nodes]

    def problems(self) -> dict[str, str]:
        """Why the process is not ready, by model ("" for the process itself); empty if it is ready."""
        if self._card_error is not None:
            return {"": f"{self._card_error.kind}: {self._card_error}"}
        if self._shutting_down:
            return {"": "the process is shutting down"}
        if self._expected is None:
            return {"": "it is not known yet which models are wanted"}
        live, told = self._generations.models(), self._told
        missing = {model: "no live version" for model in self._expected if model not in live}
        # A model that comes later has had its golden requests answered by its shards; it does not make what serves
        # already not ready.
        awaited = (model for model in self._expected if model in live and model not in told)
        unasked = dict.fromkeys(awaited, "its shards were not asked yet")
        return missing | unasked | {model: one.problem for model, one in told.items() if one.problem}

    def degraded(self) -> dict[str, str]:
        """Why the rows of a live version are older than `max_staleness_s` allows, by model; empty if none are.

        Such a process is ready: it answers, from rows that lag behind.
        """
        live, reasons, now = self._generations.live_versions(), dict[str, str](), self.wall_clock()
        for model, limit_s in self._max_staleness_s.items():
            versions = [one for _, info in self._told.get(model, _Told()).nodes for one in info.versions]
            told = [one for one in versions if (one.model, one.version) == (model, live.get(model))]
            if told and (reason := degraded_reason(told, limit_s, now)):
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
        self._told = {model: told for model, told in self._told.items() if model in models}

    async def cards_failed(self) -> NoReturn:
        """Waits until cards of this process have failed, and raises their CardError. It takes a new process."""
        await self._cards_failed.wait()
        raise self._card_error or CardError("the cards have failed")

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _refresh(self, model: str) -> None:
        told = self._told.get(model, _Told())
        try:
            with self._generations.lease(model) as lease:
                now = _Told(await lease.payload.nodes())
        except GenerationNotFoundError:
            return
        except ShardrankError as error:
            # Only cards of this process: of those of shard nodes a router makes other errors.
            faults = told.faults + 1 if isinstance(error, CardError) else 0
            now = _Told(told.nodes, f"{error.kind}: {error}", faults)
            if not told.problem:
                logger.warning("model %r is not ready: %s", model, error)
            if isinstance(error, CardError) and faults >= ENOUGH_FAULTS and self._card_error is None:
                logger.critical("the cards of this process have failed: %s", error)
                self._card_error = error
                self._cards_failed.set()
        except Exception as error:
            # A defect of one model must neither stop the watch over the others, nor pass for readiness.
            logger.exception("asking the shards of model %r failed", model)
            now = told._replace(problem=f"internal: asking its shards failed with {type(error).__name__}")
        if told.problem and not now.problem:
            logger.info("model %r is ready again", model)
        self._told = {**self._told, model: now}


def staleness_s(told: ServedVersion, now: float) -> float | None:
    """How old the newest change may be that a node has not applied, in seconds; None while it does not know.

    It is 0 at the moment at which a node finds everything applied, and grows until it looks again. So it stays small
    while nothing is published, and grows while the registry can't be reached.
    """
    return None if told.delta_fresh_at is None else max(0.0, now - told.delta_fresh_at)


def degraded_reason(told: Sequence[ServedVersion], max_staleness_s: float, now: float) -> str:
    """Why a version's rows are older than they may be, by what each node told of it; "" if they are not."""
    version = told[0].version
    ages = [age for one in told if (age := staleness_s(one, now)) is not None]
    if len(ages) < len(told):
        return f"{len(told) - len(ages)} of {len(told)} nodes with version {version} have not looked for deltas"
    if max(ages) <= max_staleness_s:
        return ""
    late = sum(age > max_staleness_s for age in ages)
    return (
        f"rows of version {version} are {max(ages):.1f} s behind on {late} of {len(ages)} nodes; "
        f"max_staleness_s = {max_staleness_s:g}"
    )

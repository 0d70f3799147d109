"""Showing rollouts once, on and on, or until one ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import click
from pydantic import BaseModel, ConfigDict
from rich.console import Group
from rich.live import Live
from rich.text import Text

from loader.errors import RegistryUnavailableError, RolloutError
from loader.registry.records import COORDINATOR_LOCK, ROLLOUTS
from loader.registry.typed import FleetRegistry
from loader.rollout.record import Rollout
from loader.rollout.requests import read_rollout
from loader.rollout.status import RolloutStatus, read_status
from serving.cli.amounts import human_time
from serving.cli.output import print_json, stdout_console
from serving.cli.rollout_view import event_line, headline, render

POLL_S = 0.2
REMIND_S = 10.0
"""How long a rollout may stand still before it is told what it waits for, again and again."""

Sleep = Callable[[float], Awaitable[None]]


class StatusList(BaseModel):
    """The status of every model that has ever been wanted or rolled out, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollouts: tuple[RolloutStatus, ...]


async def read_statuses(fleet: FleetRegistry, model: str | None) -> tuple[RolloutStatus, ...]:
    """Of one model, or of all. Raises RegistryError."""
    if model is not None:
        return (await read_status(fleet, model),)
    rolled = {key.removeprefix(ROLLOUTS) for key in await fleet.registry.entries(ROLLOUTS)}
    return tuple([await read_status(fleet, one) for one in sorted(rolled | set(await fleet.wanted()))])


async def print_status(fleet: FleetRegistry, model: str | None, *, as_json: bool) -> None:
    """Prints it once. Raises RegistryError."""
    found = await read_statuses(fleet, model)
    if as_json:
        print_json(found[0] if model is not None else StatusList(rollouts=found))
        return
    stdout_console().print(await _drawn(fleet, found))


async def watch_status(fleet: FleetRegistry, model: str | None, sleep: Sleep = asyncio.sleep) -> None:
    """Shows it until it is cancelled; a registry that does not answer is waited for.

    A terminal is drawn anew. Into a pipe or a file goes what has changed, each time that a step begins or ends.
    """
    console = stdout_console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(await _looked(fleet, model), refresh=True)
                await sleep(POLL_S)
    shown: object = None
    while True:
        try:
            found = await read_statuses(fleet, model)
            now: object = [(one.model, one.live, one.rollout_id, one.state, one.step, one.reason) for one in found]
            drawn = await _drawn(fleet, found)
        except RegistryUnavailableError as error:
            now, drawn = "waiting", _waiting(error)
        if now != shown:
            shown = now
            console.print(drawn)
        await sleep(POLL_S)


async def _looked(fleet: FleetRegistry, model: str | None) -> Group:
    try:
        return await _drawn(fleet, await read_statuses(fleet, model))
    except RegistryUnavailableError as error:
        return _waiting(error)


def _waiting(error: RegistryUnavailableError) -> Group:
    return Group(Text(f"waiting: {error}", style="red"))


async def follow_rollout(fleet: FleetRegistry, begun: Rollout, sleep: Sleep = asyncio.sleep) -> Rollout:
    """Tells what happens in a rollout, line by line, until it has ended.

    Returns:
        Its last record; how it ended has been printed, to stderr if it is not done.

    Raises:
        RolloutError: another one has taken its place in the registry before its end was seen.
        RegistryRecordError: a record can't be read.
    """
    teller = _Teller(begun)
    while True:
        try:
            on_record = await read_rollout(fleet, begun.model)
            if on_record is not None:
                if on_record.rollout.rollout_id != begun.rollout_id:
                    raise RolloutError(f"{begun.model}: another rollout followed before the end of this one was seen")
                teller.tell(on_record.rollout)
                if not on_record.rollout.active:
                    wanted = await fleet.wanted_model(begun.model)
                    _tell_end(on_record.rollout, None if wanted is None else wanted.live)
                    return on_record.rollout
                if teller.stands_still():
                    await _remind(fleet, begun.model)
        except RegistryUnavailableError as error:
            teller.tell_once(f"waiting: {error}")
        await sleep(POLL_S)


class _Teller:
    """Prints each event of a rollout once."""

    def __init__(self, begun: Rollout) -> None:
        self._told = set(begun.events)
        self._last = ""
        self._moved = time.monotonic()

    def tell(self, rollout: Rollout) -> None:
        for event in rollout.events:
            if event not in self._told:
                self._told.add(event)
                self.tell_once(event_line(event.at, event.step, event.text))

    def tell_once(self, line: str) -> None:
        if line != self._last:
            self._last = line
            self._moved = time.monotonic()
            click.echo(line)

    def stands_still(self) -> bool:
        """Whether nothing was told for a while; begins to count anew if so."""
        if time.monotonic() - self._moved < REMIND_S:
            return False
        self._moved = time.monotonic()
        return True


async def _remind(fleet: FleetRegistry, model: str) -> None:
    status = await read_status(fleet, model)
    click.echo(headline(status, time.time()))
    if await fleet.registry.holder(COORDINATOR_LOCK) is None:
        click.echo("no coordinator is running, so nothing moves: start `shardrank coordinator`")
    for lag in status.waiting_for:
        click.echo(f"  waiting for {lag}")


def _tell_end(rollout: Rollout, live: int | None) -> None:
    lasted = human_time(rollout.events[-1].at - rollout.started_at) if rollout.events else ""
    if rollout.state == "done":
        click.echo(f"{rollout.model}: version {rollout.to_version} is live, after {lasted}")
        return
    left = "no version is live" if live is None else f"version {live} is live"
    ended = rollout.state.replace("_", " ")
    click.echo(f"{rollout.model}: version {rollout.to_version} was {ended}: {rollout.reason}; {left}", err=True)


async def _drawn(fleet: FleetRegistry, found: tuple[RolloutStatus, ...]) -> Group:
    if not found:
        return Group(Text("nothing was rolled out yet"))
    has_coordinator = await fleet.registry.holder(COORDINATOR_LOCK) is not None
    return Group(*(render(status, time.time(), has_coordinator) for status in found))

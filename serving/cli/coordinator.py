"""`shardrank coordinator`: carries out the rollouts of a fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.amounts import Duration
from serving.cli.examples import WithExamples
from serving.cli.options import fleet_options
from serving.cli.registries import opened_registry, registry_url

if TYPE_CHECKING:
    from loader.rollout.coordinator import CoordinatorConfig

logger = logging.getLogger(__name__)


@click.command(cls=WithExamples)
@fleet_options
@click.option(
    "--stage-timeout",
    "stage_timeout_s",
    type=Duration(),
    metavar="TIME",
    help="How long nodes may take to stage a version before the rollout is rolled back. Default: 1h.",
)
@click.option(
    "--step-timeout",
    "step_timeout_s",
    type=Duration(),
    metavar="TIME",
    help="How long every other step may take. Default: 2m.",
)
@click.option("--owner", hidden=True, help="In whose name the lock is held; its own by default.")
@click.option("--step-delay", "step_delay_s", type=Duration(), hidden=True, help="Pause before each step, for drills.")
def coordinator(
    registry: str | None,
    store: Path | None,
    stage_timeout_s: float | None,
    step_timeout_s: float | None,
    owner: str | None,
    step_delay_s: float | None,
) -> None:
    """Carry out the rollouts of a fleet.

    Runs until SIGTERM or Ctrl-C. Of several, one works and the others stand by; if it dies, the next goes on at the
    step that is on record. It is in nobody's way: without one, requests are answered and rollouts wait.

    Examples:
      shardrank coordinator --store models
      shardrank coordinator --registry redis://10.0.0.9:6379/0 --step-timeout 5m
    """
    given = {"stage_timeout_s": stage_timeout_s, "step_timeout_s": step_timeout_s, "step_delay_s": step_delay_s}
    config = _config({name: value for name, value in given.items() if value is not None})
    _run(registry_url(registry, store), owner or f"{socket.gethostname()}:{os.getpid()}", config)


def _config(given: dict[str, float]) -> CoordinatorConfig:
    """Raises click.UsageError, naming the time that is out of range."""
    from pydantic import ValidationError

    from loader.manifest import schema_errors
    from loader.rollout.coordinator import CoordinatorConfig

    try:
        return CoordinatorConfig.model_validate(given)
    except ValidationError as error:
        raise click.UsageError("; ".join(map(str, schema_errors(error, [CoordinatorConfig])))) from error


def _run(url: str, owner: str, config: CoordinatorConfig) -> None:
    from loader.rollout.coordinator import Coordinator
    from serving.fleet.process import StopRequestedError, run_until_signalled

    async def program() -> None:
        async with opened_registry(url) as fleet:
            click.echo(f"coordinator {owner} works with registry {fleet.name}")
            await Coordinator(fleet, owner, time.time, asyncio.sleep, config).run()

    try:
        run_until_signalled(program)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)

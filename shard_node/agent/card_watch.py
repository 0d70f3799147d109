"""A shard node whose cards have failed has to end: until then CUDA answers everything with the first error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn

from shard_node.errors import CardError
from shard_node.node import ShardNode

if TYPE_CHECKING:
    from shard_node.cuda.cards import Cards

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
ENOUGH_FAULTS = 2
"""In a row: what a card does not get over, it also answers when it is asked again."""


async def watch_cards(
    node: ShardNode,
    cards: Cards | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    interval_s: float = INTERVAL_S,
) -> NoReturn:
    """Asks the cards of all versions, time and again, until cancelled. On the CPU there is nothing to ask.

    Args:
        node: whose cards.
        cards: asked too, as a node that stages its first version has no other; None for none.
        sleep: waits.
        interval_s: between two looks.

    Raises:
        CardError: they failed, and go on failing.
    """
    faults = 0
    while True:
        try:
            await asyncio.to_thread(_ask, node, cards)
        except CardError as error:
            faults += 1
            logger.critical("the cards fail: %s", error)
            if faults >= ENOUGH_FAULTS:
                raise
        else:
            faults = 0
        await sleep(interval_s)


def _ask(node: ShardNode, cards: Cards | None) -> None:
    for card in cards.cards if cards is not None else ():
        card.free_bytes()
    for generation in node.generations.all():
        generation.payload.engine.cards()

"""The status page in a real Chromium, over a fleet of real nodes in this process: what it shows, and its one button."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
from anyio.from_thread import BlockingPortal
from playwright.sync_api import Browser, Page, expect, sync_playwright

from loader.registry import open_registry
from loader.registry.fleet import NodeRecord, Quality, VersionReport
from loader.rollout.coordinator import Coordinator, CoordinatorConfig
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import read_rollout
from loader.rollout.requests import start_rollout
from serving.api.http import running_admin
from serving.api.tokens import Tokens, add_token, new_token
from serving.dashboard.board import Board
from shardrank_testing.agent_fleet import AgentFleet, agent_fleet, with_live
from shardrank_testing.background import in_background
from shardrank_testing.browser import chromium_path
from shardrank_testing.processes import wait_until
from shardrank_testing.serving_api import MODEL, api_request, ask

T = TypeVar("T")
TIMEOUT_MS = 20_000
MARKUP = "<img src=x onerror=document.title='hit'><b>bold</b>"
CONTRAST = """(selector) => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((one) => {
    const part = one / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = ([red, green, blue]) => 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  const ground = (one) => {
    const colour = getComputedStyle(one).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? ground(one.parentElement) : colour;
  };
  return [...document.querySelectorAll(selector)].filter((one) => one.textContent && one.offsetParent).map((one) => {
    const both = [getComputedStyle(one).color, ground(one)].map((text) => light(rgb(text))).sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05);
  });
}"""


class Shown:
    """A fleet that runs on a thread of its own under load, and the ports that show it.

    Attributes:
        url, token: of the page, and a token with scope `admin`.
    """

    def __init__(self, fleet: AgentFleet, folder: Any) -> None:
        self.fleet = fleet
        self.portal: BlockingPortal
        self.tokens = folder / "tokens.json"
        self.token, entry = new_token("ops", "admin")
        add_token(self.tokens, entry)
        self.url = ""

    def run(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any) -> T:
        """Have a coroutine done on the fleet's loop."""
        return self.portal.call(partial(work, *arguments, **options))

    def start_rollout(self, version: int, **options: Any) -> None:
        rollout_id = f"{time.time_ns():032x}"
        guards = GuardLimits(min_requests=0)
        self.run(start_rollout, self.fleet.fleet, MODEL, version, guards=guards, rollout_id=rollout_id, **options)

    def live_version(self) -> int:
        """Wait until no rollout runs, and return the live version."""

        def is_done() -> bool:
            found = self.run(read_rollout, self.fleet.fleet, MODEL)
            return found is None or not found.rollout.active

        wait_until(is_done, "the end of the rollout")
        return self.run(self.fleet.fleet.wanted_model, MODEL).live


@contextlib.asynccontextmanager
async def showing(folder: Any, versions: Any) -> AsyncIterator[Shown]:
    config = CoordinatorConfig(tick_s=0.05, settle_s=0.5)
    async with agent_fleet(folder, versions[1].path.parent.parent) as fleet:
        _, service = await with_live(fleet, versions)
        shown = Shown(fleet, folder)

        async def load() -> None:
            while True:
                await ask(service, api_request(1))
                await asyncio.sleep(0.1)

        tasks = [asyncio.create_task(Coordinator(fleet.fleet, "ops", time.time, asyncio.sleep, config).run())]
        tasks.append(asyncio.create_task(load()))
        page = partial(Board, partial(open_registry, fleet.fleet.registry.url))
        tokens = Tokens(shown.tokens)
        async with running_admin(service, "127.0.0.1", 0, tokens=tokens, page=page) as port:
            shown.url = f"http://127.0.0.1:{port}/"
            yield shown
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.fixture(scope="module")
def shown(tmp_path_factory, versions) -> Iterator[Shown]:
    chromium_path()
    with in_background(showing(tmp_path_factory.mktemp("f"), versions)) as (found, portal):
        found.portal = portal
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def errors() -> list[str]:
    """What went wrong on the page."""
    return []


@pytest.fixture
def page(browser: Browser, shown: Shown, errors: list[str]) -> Iterator[Page]:
    """The page, signed in; at the end, that nothing failed on it and nothing was requested elsewhere."""
    requested: list[str] = []
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    page.goto(shown.url)
    # The field has the focus.
    expect(page.locator("#view-token")).to_be_focused()
    page.keyboard.type(shown.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("#models section")
    yield page
    assert errors == []
    assert requested
    assert [url for url in requested if not url.startswith(shown.url)] == []
    page.close()


def is_shown(page: Page, selector: str, text: str) -> None:
    expect(page.locator(selector).filter(has_text=text).first).to_be_visible()


@pytest.mark.nightly
def test_it_shows_a_rollout_from_its_start_to_the_flip(shown, page):
    old = shown.live_version()
    new = 3 - old
    is_shown(page, ".head .tag", f"version {old} is live")
    page.evaluate("""() => {
      globalThis.steps = new Set();
      const shown = () => document.querySelectorAll("li.running, td .tag.warn");
      const note = () => shown().forEach((one) => steps.add(one.firstChild.data));
      new MutationObserver(note).observe(document.querySelector("#models"), { childList: true, subtree: true });
    }""")
    shown.start_rollout(new, canary_share=0.5, bake_s=1.5)
    is_shown(page, ".rollout h3", f"Rollout of version {new} in place of {old}: running")
    is_shown(page, ".rollout caption", "Guards:")
    is_shown(page, ".head .tag", f"version {new} is live")
    is_shown(page, ".rollout h3", f"Rollout of version {new} in place of {old}: done")
    assert {"canary", "canary, 50%"} <= set(page.evaluate("[...steps]"))
    assert page.locator(".steps li.done").count() == page.locator(".steps li").count() > 5
    is_shown(page, "#events tr", f"version {new}: ")
    row = page.locator("#serving tbody tr").filter(has_text="✓ live")
    expect(row).to_contain_text(f"{MODEL} {new}")
    # The slots of 5 s begin to fill: lines of requests and latencies.
    page.wait_for_selector("svg.plot polyline", state="attached")


@pytest.mark.nightly
def test_a_node_that_dies_is_shown_within_5_s(shown, page):
    row = page.locator("#shards tr").filter(has_text="shard-1-1")
    expect(row.first).to_contain_text("ready")
    died = time.time()
    shown.run(shown.fleet.nodes["shard-1-1"].die)
    expect(row).to_have_count(0)
    assert time.time() - died <= 6
    shown.run(shown.fleet.start_node, 1, 1)
    expect(row.first).to_contain_text("ready")


@pytest.mark.nightly
def test_the_button_rolls_back_by_keyboard_for_the_right_token(shown, page, errors):
    live = shown.live_version()
    shown.start_rollout(3 - live)
    assert shown.live_version() == 3 - live
    button = page.locator(".head button")
    expect(button).to_have_text(f"Roll back to version {live}")
    expect(button).to_be_enabled()
    for _ in range(5):
        page.keyboard.press("Tab")
        if button.evaluate("(one) => one === document.activeElement"):
            break
    expect(button).to_be_focused()
    assert button.evaluate("(one) => getComputedStyle(one).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#rollback-token")).to_be_focused()
    page.keyboard.type("shardrank_wrong")
    page.keyboard.press("Enter")
    is_shown(page, "#rollback-error", "the token is not known here")
    # Chromium notes each answer that is an error.
    assert len(errors) == 1
    assert "401" in errors.pop()
    assert shown.live_version() == 3 - live
    page.keyboard.type(shown.token)
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_be_hidden(timeout=TIMEOUT_MS)
    is_shown(page, ".head .tag", f"version {live} is live")
    assert shown.live_version() == live
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_both_colour_schemes_are_there_and_can_be_read(shown, page):
    grounds = {}
    is_shown(page, "#shards td", "ready")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        contrasts = page.evaluate(CONTRAST, "h1, h2, h3, p, td, th, .tag, .steps li, button:not(:disabled), footer")
        # WCAG 2.2, 1.4.3.
        assert len(contrasts) > 30
        assert min(contrasts) >= 4.5
    assert grounds["light"] != grounds["dark"]


def test_what_is_announced_is_text_and_never_markup(shown, page):
    report = VersionReport(model=MODEL, version=7, state="refused", reason=MARKUP)
    bad = NodeRecord(node_id="bad", kind="shard", process_id=1, address=MARKUP, shard_index=0, versions=(report,))
    shown.run(shown.fleet.fleet.announce_node, bad, 60)
    is_shown(page, "#shards tr", MARKUP)
    shown.run(shown.fleet.fleet.announce_quality, Quality(model=MODEL, auc=0.7, recent_auc=0.75, scored=900), 60)
    is_shown(page, "#models .head", "AUC 0.7500 lately, 0.7000 of 900 scores")
    assert page.locator("main img, main b").count() == 0
    assert page.title() == "shardrank"
    shown.run(shown.fleet.fleet.withdraw_node, "bad")

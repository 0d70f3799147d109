"""The order of test files, the longest first, so that no worker waits for another's at the end; and lost devices."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Each worker imports everything, and collects some ten thousand tests: of that the collector's young rounds, which find
# nothing, are a quarter.
gc.set_threshold(100_000)
# How long an example takes says something of the machine, and of what else runs there, nothing of the code.
settings.register_profile("ci", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=200)
settings.load_profile("ci")

TESTS = Path(__file__).parent
# Where the processes that tests start find `shardrank_testing`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS / "support"), os.environ.get("PYTHONPATH"))))
# Of more than 10 s each, the longest first. tests/test_house.py sees that they are there.
LONGEST = (
    "simulation/test_simulation.py",
    "serving/fleet/test_up.py",
    "serving/versions/test_hot_swap.py",
    "serving/dashboard/test_page_in_browser.py",
    "serving/cli/test_protection.py",
    "serving/cli/test_registered.py",
    "loader/rollout/test_rollout_crashes.py",
    "serving/test_hostile_messages.py",
    "shard_node/cuda/test_under_address_sanitizer.py",
    "serving/versions/test_serving_agent.py",
    "serving/versions/test_dense_steps.py",
    "loadtest/test_compare_cards.py",
    "serving/test_demo.py",
    "loadtest/bench/test_benchmarks.py",
    "serving/cli/test_cli_group.py",
    "serving/api/test_tls_and_tokens.py",
)
_TURNS = {TESTS / name: turn for turn, name in enumerate(LONGEST)}


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Coroutines run on uvloop, as the server does."""
    return "asyncio", {"use_uvloop": True}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _TURNS.get(item.path, len(LONGEST)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten slowest files: seconds of their tests, set-up and teardown included."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("slowest files")
    for path, duration in seconds.most_common(10):
        terminalreporter.write_line(f"{duration:7.1f} s  {path}")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends a worker whose device is lost: CUDA answers all with that error from then on. Another worker starts anew."""
    done = yield
    torch = sys.modules.get("torch")
    if torch is not None and item.get_closest_marker("gpu") and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{item.nodeid}: the device is lost: {error}", file=sys.__stderr__, flush=True)
            # The test's reports are sent, that it is over is not: xdist takes this one for crashed, and no other.
            os._exit(1)
    return done

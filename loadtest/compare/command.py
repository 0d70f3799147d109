"""From a command line to a comparison's exit code: its settings, its folders, its result on screen and in files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from loadtest.compare.arm_commands import Ports
from loadtest.compare.compared_model import compared_snapshot
from loadtest.compare.config import Budgets, CompareConfig
from loadtest.compare.hosts import check_hosts
from loadtest.compare.measures import compared
from loadtest.compare.rounds import measure_rounds, target_of
from loadtest.compare.show import show_comparison
from loadtest.drill.running import INTERRUPTED, drill_config
from loadtest.load.config import LoadConfig
from loadtest.load.result_file import check_writable, write_document
from loadtest.report.comparison import Comparison
from loadtest.report.page import write_html
from loadtest.workloads.payloads import GRPC_APIS
from serving.cli.output import progress_bars, stdout_console
from serving.fleet.process import StopRequestedError, run_until_signalled
from shard_node.cuda.device_choice import DeviceChoice

# Until the ports are chosen: the settings are checked before anything is started.
_ANY_PORTS = Ports(http=1, grpc=1)


@dataclass(frozen=True, slots=True)
class CompareCommand:
    """What a command line says beside what is compared.

    Attributes:
        store: folder of the model; None for a temporary one.
        json_file: where the comparison goes.
        html_file: where the page goes.
    """

    store: Path | None
    json_file: Path | None
    html_file: Path | None


def checked_configs(
    compare: Mapping[str, object], budgets: Mapping[str, object], load: Mapping[str, object]
) -> tuple[CompareConfig, LoadConfig]:
    """The settings; a value of None is the default.

    Raises:
        click.UsageError: naming the option that does not fit.
        DeviceChoiceError: no such device.
    """
    api = load["api"]
    target = target_of("grpc" if api in GRPC_APIS else "json", _ANY_PORTS)
    checked = drill_config(Budgets, dict(budgets))
    DeviceChoice.parse(checked.device)
    return (
        drill_config(CompareConfig, {**compare, "budgets": checked}),
        drill_config(LoadConfig, {**load, "target": target}),
    )


def execute(command: CompareCommand, config: CompareConfig, load: LoadConfig) -> int:
    """Runs a comparison.

    Returns:
        The exit code: 0; 1 if a run can't be believed; 130 after a signal.

    Raises:
        ShardrankError: it can't be run to its end, or a file can't be written.
    """
    for file in (command.json_file, command.html_file):
        if file is not None:
            check_writable(file)
    if config.hosts:
        check_hosts(config.delay_ms)
    try:
        comparison = _measured(command, config, load)
    except StopRequestedError:
        return INTERRUPTED
    if command.json_file is not None:
        write_document(comparison, command.json_file)
    if command.html_file is not None:
        write_html(comparison, command.html_file)
    show_comparison(stdout_console(), comparison)
    return 0 if comparison.valid else 1


def _measured(command: CompareCommand, config: CompareConfig, load: LoadConfig) -> Comparison:
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="shardrank-compare-") as temporary:
        folder = Path(temporary)
        with progress_bars() as bars:
            snapshot = compared_snapshot(config, load, command.store or folder / "store", bars)
        measurements = run_until_signalled(lambda: measure_rounds(config, load, snapshot, folder, console, say))
    return compared(config, load, measurements)

"""The CUDA engine measured on a GPU: `python -m loadtest.bench_gpu --json FILE [--quick]`.

Parts, each in a process of its own, so that one that fails or hangs takes nothing of the others with it: `copy`, the
device's copy bandwidth, and how fast it reads rows at random; `kernel`, the pooling kernel at every size that matters,
with logical cards and rows in pinned memory; `compare`, nn.EmbeddingBag, gather-then-sum and FBGEMM on the same rows;
`variants`, the kernels' switches, each in turns with the defaults; `ranking`, one request end to end in local mode.

Every answer is compared with a reference before it is timed. The file is written again as rows come in: whatever ends
the run, what was measured until then is in it. It ends within 8 minutes; exit code 1 if a part failed.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console

try:
    import torch

    import shard_node.cuda
    from loadtest.gpu import variants
    from loadtest.gpu.parts import FORMAT, FULL, QUICK, BenchPart, BenchReport, BenchSize, Work, run_part, wait_or_kill
    from loadtest.gpu.pooling import measure_copies, measure_kernel, measure_others
    from loadtest.gpu.tables import show
    from shard_node.cuda.card_set import DeviceChoice, open_cards
    from shard_node.cuda.cards import Cards
    from shard_node.cuda.kernel_params import SWITCH_VALUES, KernelSwitches
    from shard_node.errors import DeviceChoiceError
except ImportError as missing:
    raise SystemExit(f"bench_gpu: {missing}. It needs what pyproject.toml names: pip install '.[cuda]'") from missing

# Shares of the time; what a part leaves is divided among those after it.
SHARES = {"copy": 20.0, "kernel": 130.0, "compare": 50.0, "variants": 50.0, "ranking": 110.0}
SECONDS = 440.0
START_S = 10.0
"""For a part's process to begin."""
GRACE_S = 10.0
"""That a part may be late before its process is killed."""
PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "triton", "pydantic")
_ASKED = "name,driver_version,memory.total,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
_ASKED_WITHIN_S = 20
Command = Callable[[str, Path, float], list[str]]
OpenCards = Callable[..., Cards]
"""Opens so many logical cards, with the kernels' `switches` if they are given."""


def measure(work: Work, name: str, opened: OpenCards, size: BenchSize) -> None:
    """Measure one part."""
    cards = opened(1)
    work.ran_on(describe(cards))
    if name == "ranking":
        # It needs the serving packages: without them the other parts are measured all the same.
        from loadtest.gpu import ranking

        ranking.measure(work, opened, size)
    elif name == "variants":
        variants.measure(work, opened, size)
    else:
        {"copy": measure_copies, "kernel": measure_kernel, "compare": measure_others}[name](work, cards, size)


def describe(cards: Cards) -> dict[str, Any]:
    """Describe what a reader needs to judge the figures, or to measure again."""
    device = cards.cards[0].torch_device
    kernels = Path(shard_node.cuda.__file__).with_name("kernels.cu")
    return {
        "cards": cards.name,
        "num_cards": len(cards.cards),
        "switches": str(cards.switches),
        "peer_access": cards.peer_access,
        "device": _properties(device) if device.type == "cuda" else {"name": f"emulated, {platform.machine()}"},
        "nvidia_smi": _nvidia_smi(),
        "versions": _versions(),
        "kernels_sha256": hashlib.sha256(kernels.read_bytes()).hexdigest(),
    }


def _properties(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": getattr(found, "L2_cache_size", None),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _nvidia_smi() -> dict[str, str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASKED_WITHIN_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    lines = answer.strip().splitlines()
    return dict(zip(_ASKED.split(","), map(str.strip, lines[0].split(",")), strict=False)) if lines else None


def run_here(
    report: BenchReport,
    names: Sequence[str],
    seconds: float,
    opened: OpenCards,
    size: BenchSize,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Run parts in this process, one after the other."""
    began = time.perf_counter()
    for position, name in enumerate(names):
        left = seconds - (time.perf_counter() - began)
        budget_s = allowance(names[position:], left)
        run_part(report, name, budget_s, partial(measure, name=name, opened=opened, size=size), say=say)


def run_apart(report: BenchReport, path: Path, names: Sequence[str], seconds: float, command: Command) -> BenchReport:
    """Run each part in a process of its own, which adds to the file; a command is of a name, the file and seconds."""
    began = time.perf_counter()
    for position, name in enumerate(names):
        starts_s = START_S * (len(names) - position)
        budget_s = allowance(names[position:], seconds - (time.perf_counter() - began) - starts_s)
        part_began = time.perf_counter()
        report.parts.pop(name, None)  # Of an earlier run: what the process does not get to must not seem measured.
        report.save()
        # A group of its own, so that what the part starts ends with it.
        process = subprocess.Popen(command(name, path, budget_s), start_new_session=True)
        code = wait_or_kill(process, START_S + budget_s + GRACE_S)
        report = BenchReport.read(path)
        part = report.parts.setdefault(name, BenchPart(name, budget_s))
        if code is None:
            part.status = "failed"
            part.error = f"it did not end within {START_S + budget_s + GRACE_S:.0f} s and was killed"
        elif part.status in ("running", "not run") and code != 0:
            part.status = "failed"
            part.error = f"its process ended with {code}; its output says why"
        elif code not in (0, 1):
            part.notes.append(f"its process ended with {code} after the last row.")
        part.seconds = time.perf_counter() - part_began
        report.save()
    return report


def allowance(names: Sequence[str], seconds_left: float) -> float:
    """Give seconds to the first of the parts that are still to run."""
    return max(1.0, seconds_left) * SHARES[names[0]] / sum(SHARES[name] for name in names)


def open_on(device: str, num_cards: int, switches: KernelSwitches | None = None) -> Cards:
    """Open logical cards on the device."""
    cards = open_cards(DeviceChoice.parse(device), num_cards, switches)
    if cards is None:
        raise click.UsageError(f"--device {device}: the bench needs a CUDA device, as in cuda:0")
    return cards


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here.")
@click.option("--quick", is_flag=True, help="2 GB of rows and few configurations: does it work? Some 2 minutes.")
@click.option("--part", "names", type=click.Choice(list(SHARES)), multiple=True, help="Only these; repeatable.")
@click.option("--device", default="cuda:0", show_default=True, help="Of all logical cards.")
@click.option("--seconds", type=click.FloatRange(min=1), default=SECONDS, show_default=True, help="For all parts.")
@click.option("--table-gb", type=click.FloatRange(min=0.001), help="int8 GB of rows; by default 20, or 2 if quick.")
@click.option("--dim", "dims", type=click.IntRange(4, 512), multiple=True, help="Instead of 128 and 64; repeatable.")
@click.option("--hotness", type=click.IntRange(1, 1000), multiple=True, help="Rows of a bag, likewise.")
@click.option("--batch", "batches", type=click.IntRange(1, 1 << 20), multiple=True, help="Bags of a launch, likewise.")
@click.option(
    "--switch", "turned", multiple=True, metavar="NAME=VALUE", help=f"Of {', '.join(SWITCH_VALUES)}; repeatable."
)
@click.option(
    "--fbgemm",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="SHARDRANK_FBGEMM",
    help="Folder of FBGEMM's libraries; by default fbgemm_gpu in Python's own.",
)
@click.option("--one-process", is_flag=True, help="Run the parts in this process: for profilers.")
@click.option("--add", is_flag=True, help="Keep what the file already has of other parts.")
def main(
    json_path: Path | None,
    quick: bool,
    names: tuple[str, ...],
    device: str,
    seconds: float,
    turned: tuple[str, ...],
    one_process: bool,
    add: bool,
    **sizes: Any,
) -> None:
    """Run the bench."""
    console = Console(width=140)
    size = _size(quick, **sizes)
    switches = _switches(turned)
    opens = partial(open_on, device, switches=switches) if switches.turned() else partial(open_on, device)
    chosen = [name for name in SHARES if name in names or (not names and name != "variants")]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = json_path or Path(folder) / "result.json"
        report = BenchReport.read(path) if add and path.exists() else BenchReport(path)
        report.head = report.head or _head(size)
        try:
            report.save()
        except OSError as error:
            raise click.UsageError(f"--json {path}: can't be written: {error.strerror}") from error
        if one_process:
            say = partial(console.print, markup=False, highlight=False)
            run_here(report, chosen, seconds, opens, size, say)
        else:
            options = [f"--device={device}", *(f"--switch={one}" for one in turned), *_size_options(quick, **sizes)]
            report = run_apart(report, path, chosen, seconds, partial(_command, options))
            show(report, console)
    sys.exit(1 if report.failed(chosen) else 0)


def _switches(turned: Sequence[str]) -> KernelSwitches:
    values: dict[str, int] = {}
    for one in turned:
        name, _, value = one.partition("=")
        if not value.isdecimal():
            raise click.UsageError(f"--switch {one}: it must be NAME=VALUE, as in bags_per_lane_group=2")
        values[name] = int(value)
    try:
        return KernelSwitches.of(values)
    except DeviceChoiceError as error:
        raise click.UsageError(f"--switch: {error}") from error


def _size(quick: bool, table_gb: float | None, fbgemm: Path | None, **several: tuple[int, ...]) -> BenchSize:
    given: dict[str, Any] = {name: values for name, values in several.items() if values}
    if table_gb is not None:
        given["table_bytes"] = int(table_gb * 1e9)
    if fbgemm is not None:
        given["fbgemm"] = fbgemm
    return replace(QUICK if quick else FULL, **given)


def _size_options(quick: bool, table_gb: float | None, fbgemm: Path | None, **several: tuple[int, ...]) -> list[str]:
    """Return the same on the command line of a part."""
    options = ["--quick"] if quick else []
    options += [] if table_gb is None else [f"--table-gb={table_gb}"]
    options += [] if fbgemm is None else [f"--fbgemm={fbgemm}"]
    names = {"dims": "dim", "hotness": "hotness", "batches": "batch"}
    return options + [f"--{names[field]}={value}" for field, values in several.items() for value in values]


def _command(options: list[str], name: str, path: Path, seconds: float) -> list[str]:
    begin = [sys.executable, "-m", "loadtest.bench_gpu", "--one-process", "--add"]
    return [*begin, f"--part={name}", f"--json={path}", f"--seconds={seconds}", *options]


def _head(size: BenchSize) -> dict[str, object]:
    return {
        "benchmark": "bench_gpu",
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "loadtest.bench_gpu", *sys.argv[1:]]),
        "table_bytes": size.table_bytes,
    }


if __name__ == "__main__":
    main()

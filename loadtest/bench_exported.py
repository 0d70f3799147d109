"""What a built-in model costs as an exported program: CPU a request, of the whole way from bytes to scores.

`python -m loadtest.bench_exported`. Each model is served twice in this process, as it is built in and as a program of
itself that computes the context once a request, in the same number format and of the same rows. Requests of 20 context
features, 6 of candidates and 13 floats come as JSON from several threads; the two take turns, and the CPU time that
the process spent is divided by the requests.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal

import click
import numpy as np
import torch

from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from serving.formats.json_reader import JsonCodec
from serving.models.exported import exported_copy
from serving.models.layers import bfloat16_is_native
from serving.models.ranking_models import build_model, load_model
from serving.rank.service import RankingService, answer_in_thread
from serving.versions.loading import ModelSource, load_served_model

Format = Literal["float32", "bfloat16"]
NUM_CONTEXT, NUM_CANDIDATE, DIM, ROWS = 20, 6, 64, 20_000
HISTORY: Final = 20
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "mlp": {"hidden": [256, 64]},
    "dlrm": {"bottom_mlp": [128, DIM], "top_mlp": [256, 64]},
    "dcn_v2": {"num_cross_layers": 2, "low_rank": 64, "deep": [256, 64]},
    "target_attention": {
        "history_feature": "c0",
        "target_feature": "k0",
        "attention_hidden": [32],
        "hidden": [128, 64],
    },
}


def described(kind: str) -> ModelSpec:
    """Describe the model of a kind."""
    context = [f"c{number}" for number in range(NUM_CONTEXT)]
    names = [*context, *(f"k{number}" for number in range(NUM_CANDIDATE))]
    is_sequence = {"c0"} if kind == "target_attention" else set()
    return ModelSpec(
        model="bench",
        tables=tuple(
            TableSpec(name=f"t_{name}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=(name,)) for name in names
        ),
        features=tuple(
            FeatureSpec(
                name=name,
                side="context" if name in context else "candidate",
                pooling="none" if name in is_sequence else None,
            )
            for name in names
        ),
        dense_inputs=DenseInputs(context=7, candidate=6),
        dense_model=DenseModelSpec(kind=kind, config=CONFIGS[kind]),
    )


def write_both(store: Path, kind: str, number_format: Format) -> tuple[Path, Path]:
    """Write the model as it is built in, and as a program of itself: two versions of the same rows."""
    spec, draw = described(kind), np.random.default_rng(0)
    torch.manual_seed(0)
    tensors = {name: tensor * 0.1 for name, tensor in build_model(spec).state_dict().items()}
    rows = {one.name: ArrayRows(draw.standard_normal((ROWS, DIM), np.float32) * np.float32(0.1)) for one in spec.tables}
    model = load_model(spec, tensors)
    model.pack(number_format, portable=True)
    exported, program = exported_copy(spec, model)
    built_in = export_snapshot(store, spec, rows=rows, dense=tensors)
    return built_in, export_snapshot(store, exported, rows=rows, dense=program)


def bodies(kind: str, least: int, most: int, count: int = 64) -> list[bytes]:
    """Make requests of so many candidates each."""
    draw = np.random.default_rng(1)
    made = []
    for _ in range(count):
        candidates = int(draw.integers(least, most + 1))
        context = {f"c{number}": draw.integers(ROWS, size=1).tolist() for number in range(NUM_CONTEXT)}
        if kind == "target_attention":
            context["c0"] = draw.integers(ROWS, size=HISTORY).tolist()
        own = {f"k{number}": draw.integers(ROWS, size=candidates).tolist() for number in range(NUM_CANDIDATE)}
        dense = draw.standard_normal(7).tolist(), draw.standard_normal((candidates, 6)).tolist()
        request = {
            "context": {"sparse": context, "dense": dense[0]},
            "candidates": {"sparse": own, "dense": dense[1]},
        }
        made.append(json.dumps(request).encode())
    return made


def cpu_us(service: RankingService, requests: list[bytes], pool: ThreadPoolExecutor, seconds: float) -> float:
    """Answer requests for so long; returns microseconds of this process's CPU a request."""
    ends, done, began = time.monotonic() + seconds, 0, time.process_time()
    while time.monotonic() < ends:
        list(pool.map(lambda body: answer_in_thread(service, JsonCodec("rank", "bench"), body), requests))
        done += len(requests)
    return 1e6 * (time.process_time() - began) / done


@click.command()
@click.option("--callers", help="Threads that ask.", type=click.IntRange(1, 64), default=8)
@click.option("--rounds", help="Turns of each.", type=click.IntRange(1, 100), default=7)
@click.option("--seconds", help="Of a turn.", type=click.FloatRange(0.1, 60), default=1.5)
@click.option("--candidates", help="Least and most.", type=(int, int), default=(50, 150))
@click.option("--kind", "kinds", type=click.Choice(list(CONFIGS)), multiple=True, default=list(CONFIGS))
@click.option("--out", help="Where the figures are written, JSON.", type=click.Path(path_type=Path))
def main(
    callers: int, rounds: int, seconds: float, candidates: tuple[int, int], kinds: tuple[str, ...], out: Path | None
) -> None:
    """Compare built-in models with programs of themselves."""
    torch.set_num_threads(1)
    found = []
    formats: tuple[Format, ...] = ("float32", "bfloat16") if bfloat16_is_native() else ("float32",)
    for kind in kinds:
        for number_format in formats:
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(callers) as pool:
                paths = write_both(Path(folder), kind, number_format)
                with closing(RankingService()) as built_in, closing(RankingService()) as program:
                    for service, path in zip((built_in, program), paths, strict=True):
                        source = ModelSource(snapshot=path, dtype=number_format, trust_exported=True)
                        service.install(load_served_model(source, service))
                    requests = bodies(kind, *candidates)
                    for service in (built_in, program):
                        cpu_us(service, requests, pool, seconds)
                    turns = [
                        (cpu_us(built_in, requests, pool, seconds), cpu_us(program, requests, pool, seconds))
                        for _ in range(rounds)
                    ]
            ratios = [other / own for own, other in turns]
            one = {
                "kind": kind,
                "dtype": number_format,
                "built_in_us": statistics.median(own for own, _ in turns),
                "program_us": statistics.median(other for _, other in turns),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
            found.append(one)
            click.echo(
                f"{kind} {number_format}: {one['built_in_us']:.0f} built in, {one['program_us']:.0f} as a program, "
                f"ratio {one['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )
    if out is not None:
        config = {"callers": callers, "rounds": rounds, "seconds": seconds, "candidates": list(candidates)}
        document = {"config": config, "cpus": os.cpu_count(), "torch": torch.__version__, "results": found}
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

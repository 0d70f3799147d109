"""What a step of data-parallel training sends: by parameter servers, by all-reduce, or each for its half. Pure.

K workers train P dense parameters and a table of V rows of D numbers; of the table each looks up n different rows a
step, none of which another one has: the most that may move. A number has b bytes. Sources are the textbook formulas of
data-parallel training: a ring sends 2 (K - 1) / K of what is reduced over each of its K links (Patarasu and Yuan,
2009); a server's link carries what each worker pushes and pulls, 2 K times, and 1/S of that with S servers.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loader.snapshot.tables import Frozen


class TrainingStep(Frozen):
    """What is trained: K workers, S servers, P dense parameters, V rows of `dim` numbers, n of them in a worker's step.

    Attributes:
        worker_ids: n, different rows that one worker looks up in a step.
        number_bytes: of a parameter and of a gradient.
    """

    params: int = Field(ge=1)
    workers: int = Field(ge=1)
    servers: int = Field(ge=1)
    rows: int = Field(ge=1)
    dim: int = Field(ge=1)
    worker_ids: int = Field(ge=1)
    number_bytes: int = Field(default=4, ge=1)


def training_traffic(step: TrainingStep) -> dict[str, Any]:
    """Return the bytes of a step as JSON's objects: of the dense half, of the table, and of both by three ways.

    `ratio` says how many times as many bytes the worse way sends. `crossover_ids` is the number of rows a worker from
    which on all-reduce of the whole table sends fewer bytes than servers do: 2 K n = 2 (K - 1) V.
    """
    workers, pushed_and_pulled, passed_on = step.workers, 2 * step.workers, 2 * (step.workers - 1)
    dense_bytes, row_bytes = step.params * step.number_bytes, step.dim * step.number_bytes
    server_link, ring_link = pushed_and_pulled * dense_bytes / step.servers, passed_on * dense_bytes / workers
    by_servers, by_ring = pushed_and_pulled * step.worker_ids * row_bytes, passed_on * step.rows * row_bytes
    crossover, touched = passed_on * step.rows / pushed_and_pulled, min(workers * step.worker_ids, step.rows)
    hybrid = passed_on * dense_bytes + by_servers
    all_reduce, servers = passed_on * dense_bytes + by_ring, pushed_and_pulled * dense_bytes + by_servers
    return {
        "inputs": step.model_dump(),
        "dense": {
            "all_reduce_link_bytes": ring_link,
            "server_link_bytes": server_link,
            "ratio": server_link / ring_link if ring_link else None,
        },
        "table": {
            "server_bytes": by_servers,
            "all_reduce_bytes": by_ring,
            "ratio": by_ring / by_servers,
            "touched_rows": touched,
            "touched_share": touched / step.rows,
            "crossover_ids": crossover,
            "fewer_bytes": "servers" if step.worker_ids < crossover else "all-reduce",
        },
        "step": {"hybrid_bytes": hybrid, "all_reduce_bytes": all_reduce, "servers_bytes": servers},
    }

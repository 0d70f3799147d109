"""Keep a server busy: `python -m loadtest.compare.closed_process CONFIG`, CONFIG being a `LoadConfig`.

A closed loop: the same number of requests is always out, and each answer is followed by the next request. It has no
say in latency; what is found is how much a server can do, and what a request costs it. Since it has the requests, it
also tells a server's scores of single ones.
"""

from __future__ import annotations

import signal
import sys
import urllib.error
from collections.abc import Iterator

import grpc
import numpy as np
import uvloop
from pydantic import Field, TypeAdapter

from loader.snapshot.manifest import Frozen
from loadtest.load.config import LoadConfig
from loadtest.load.generator_process import open_payloads
from loadtest.load.messages import ProcessConfig
from loadtest.serving_cost.client_process import weigh
from loadtest.serving_cost.errors import LateAnswerError, WrongAnswerError
from loadtest.serving_cost.helper_process import answer_lines
from loadtest.serving_cost.messages import Scores, ServerLoad, Weighed
from loadtest.serving_cost.one_answer import scores_of
from loadtest.serving_cost.servers import Server
from loadtest.workloads.payloads import Headers, Payloads, changing_headers


class ScoresAsked(Frozen):
    """What are a server's scores of one request of the pool? Answered with `Scores`."""

    http_port: int
    grpc_port: int
    request: int = Field(ge=0)


TO_CLIENT: TypeAdapter[ServerLoad | ScoresAsked] = TypeAdapter(ServerLoad | ScoresAsked)


def main(arguments: list[str]) -> int:
    """The program; returns its exit code."""
    # A terminal's Ctrl-C is for the process that started it, which then ends this one's input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load = LoadConfig.model_validate_json(arguments[0])
    _, pool = open_payloads(ProcessConfig(load=load, process=0))
    headers = changing_headers(load.varied, load.seed)

    def answer(line: str) -> Weighed | Scores:
        asked = TO_CLIENT.validate_json(line)
        return _scores(asked, pool) if isinstance(asked, ScoresAsked) else _weighed(asked, pool, headers)

    answer_lines(answer)
    return 0


def _weighed(load: ServerLoad, pool: Payloads, headers: Iterator[Headers]) -> Weighed:
    try:
        return uvloop.run(weigh(load, pool, headers))
    except LateAnswerError as error:
        raise LateAnswerError(
            f"{error}; with {load.in_flight} requests in flight the server needs more time than they have: "
            "let fewer be out (--in-flight), or give them longer (--timeout-ms)"
        ) from error


def _scores(asked: ScoresAsked, pool: Payloads) -> Scores:
    server = Server(asked.http_port, asked.grpc_port, process_ids=())
    try:
        scores = scores_of(server, pool, asked.request)
    except (urllib.error.URLError, grpc.RpcError) as error:
        raise WrongAnswerError(f"{pool.api}: request {asked.request}: {error}") from error
    if not np.isfinite(scores).all():
        raise WrongAnswerError(f"{pool.api}: request {asked.request}: a score that is not finite")
    return Scores(scores=tuple(scores.tolist()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""A process that keeps a server busy: `python -m loadtest.compare.closed_process CONFIG`, CONFIG being a `LoadConfig`.

A closed loop: the same number of requests is always out, and each answer is followed by the next request. It has no
say in latency; what is found is how much a server can do, and what a request costs it.
"""

from __future__ import annotations

import signal
import sys

import uvloop

from loadtest.load.config import LoadConfig
from loadtest.load.generator_process import open_payloads
from loadtest.load.messages import ProcessConfig
from loadtest.serving_cost.client_process import weigh
from loadtest.serving_cost.errors import WrongAnswerError
from loadtest.serving_cost.helper_process import answer_lines
from loadtest.serving_cost.messages import ServerLoad, Weighed


def main(arguments: list[str]) -> int:
    """The program; returns its exit code."""
    # A terminal's Ctrl-C is for the process that started it, which then ends this one's input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, pool = open_payloads(ProcessConfig(load=LoadConfig.model_validate_json(arguments[0]), process=0))

    def answer(line: str) -> Weighed:
        try:
            return uvloop.run(weigh(ServerLoad.model_validate_json(line), pool))
        except BaseExceptionGroup as errors:
            # Several requests fail together when a server does; the first says why.
            raise WrongAnswerError(f"{pool.api}: {errors.exceptions[0]}") from errors

    answer_lines(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

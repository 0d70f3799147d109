"""The benchmark's branch of the error tree.

```
ShardrankError
└── ServingBenchError           500 INTERNAL             the benchmark can't be run to its end
    ├── HelperProcessError                               a process that it started has ended, or does not answer
    └── WrongAnswerError                                 a server whose scores are not the model's, or that failed
        └── LateAnswerError                              a server that says that a request's deadline has passed
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class ServingBenchError(ShardrankError):
    """The benchmark can't be run to its end. What it measures is not an error but its result."""

    kind = "serving_bench"


class HelperProcessError(ServingBenchError):
    """A process of the benchmark has ended by itself, or did not answer in time."""

    kind = "serving_bench_process"


class WrongAnswerError(ServingBenchError):
    """A request failed, or its scores are not those of the model. A benchmark of wrong answers is worth nothing."""

    kind = "serving_bench_answer"


class LateAnswerError(WrongAnswerError):
    """A request's deadline passed before it was answered: more is asked of the server than it can do in that time."""

    kind = "serving_bench_late"

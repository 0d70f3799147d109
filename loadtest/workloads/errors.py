"""The workloads' branch of the error tree.

```
ShardrankError
└── WorkloadError               400 INVALID_ARGUMENT     a workload that can't be made as asked
    ├── PrepareError            500 INTERNAL             its snapshot can't be written here
    └── AnswerError             500 INTERNAL             bytes that are no answer to a rank request
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class WorkloadError(ShardrankError):
    """A workload, a distribution or an API that there is not. The message says what is allowed."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "workload"


class PrepareError(WorkloadError):
    """A workload's snapshot that can't be written into a store."""

    http_status = 500
    grpc_status = "INTERNAL"
    kind = "workload_prepare"


class AnswerError(WorkloadError):
    """An answer that arrived with success but holds no scores. The message says what is wrong with it."""

    http_status = 500
    grpc_status = "INTERNAL"
    kind = "workload_answer"

"""The load generator's branch of the error tree.

```
ShardrankError
└── LoadError                   500 INTERNAL             a load that can't be run to its end
    ├── LoadConfigError         400 INVALID_ARGUMENT     what was asked for can't be run
    ├── GeneratorError                                   a process that sends ended, or did not begin
    └── ResultFileError         400 INVALID_ARGUMENT     a result that can't be read or written
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class LoadError(ShardrankError):
    """A load can't be run to its end. Requests that fail are no error but its result."""

    kind = "load"


class LoadConfigError(LoadError):
    """A target, a rate, a workload or a file of marks that can't be used. The message names the option."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "load_config"


class GeneratorError(LoadError):
    """A process that sends requests ended by itself, or did not begin in time."""

    kind = "load_generator"


class ResultFileError(LoadError):
    """A result's file that is not there, can't be read or written, or holds something else."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "load_result"

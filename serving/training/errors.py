"""What the trainer refuses.

```
ShardrankError
└── TrainingError         400 INVALID_ARGUMENT   options that can't be trained with
    └── DatasetError      400 INVALID_ARGUMENT   a data file that is missing or malformed, by file and line
```
"""

from __future__ import annotations

from loader.errors import ShardrankError


class TrainingError(ShardrankError):
    """Options, or a dataset, that no model can be trained with."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "bad_training"


class DatasetError(TrainingError):
    """A data file is missing or malformed. The message names the file and the line."""

    kind = "bad_dataset"

"""Errors that only the Open Inference Protocol has.

```
BadRequestError
└── UnsupportedExtensionError   400 INVALID_ARGUMENT     a part of the protocol's extensions that is not spoken here
ServingError
├── AmbiguousInputsError        400 FAILED_PRECONDITION  a model whose inputs can't be told apart by name
└── RepositoryControlError      400 FAILED_PRECONDITION  models are not loaded or unloaded by clients
```
"""

from __future__ import annotations

from serving.errors import BadRequestError, ServingError


class UnsupportedExtensionError(BadRequestError):
    """Something that would change the answer, by an extension that is not spoken here."""

    kind = "unsupported_extension"


class AmbiguousInputsError(ServingError):
    """Two inputs of a model would have the same name."""

    http_status = 400
    grpc_status = "FAILED_PRECONDITION"
    kind = "ambiguous_inputs"


class RepositoryControlError(ServingError):
    """A client asked to load or unload a model."""

    http_status = 400
    grpc_status = "FAILED_PRECONDITION"
    kind = "repository_control"

    def __init__(self) -> None:
        super().__init__("models are not loaded or unloaded by clients; versions come and go by rollouts")

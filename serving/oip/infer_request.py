"""An inference request as the protocol has it, whatever it came over; its tensors are not decoded yet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from serving.errors import InvalidFieldError
from serving.limits import MAX_ID
from shard_node.bags import Float32Array, Int64Array

Buffer: TypeAlias = bytes | bytearray | memoryview
IntegerType: TypeAlias = Literal["INT64", "INT32"]
Integers: TypeAlias = Int64Array | npt.NDArray[np.int32]
MAX_VERSION_CHARS = 19
MAX_NAME_CHARS = 128


class TensorData(Protocol):
    """The elements of one tensor, in one of the protocol's forms. Each method is told how many there must be.

    Each raises CountMismatchError for another number of them, and MalformedRequestError, InvalidFieldError or
    InvalidIdError for what is no such element; `name` is the input's, for these errors.
    """

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """int64 or int32 [count]."""
        ...

    def floats(self, name: str, count: int) -> Float32Array:
        """float32 [count]; NaN and inf are not looked for."""
        ...

    def texts(self, name: str, count: int) -> list[str]:
        """Strings, as many as `count`."""
        ...


@dataclass(slots=True, eq=False)
class InputTensor:
    """One input.

    Attributes:
        name: which one.
        datatype: as the client names it.
        shape: as the client gives it; not checked.
        data: its elements.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: TensorData


@dataclass(slots=True, eq=False)
class InferInputs:
    """The inputs of one request, which are read when the model version is known that may have seen their like before.

    Attributes:
        read: decodes them, in the client's order. It raises MalformedRequestError, InvalidFieldError or
            UnsupportedExtensionError for what is wrong with them whatever the model.
        form: all that the request says of its inputs but their elements: requests with equal forms have inputs of the
            same names, datatypes, shapes and sizes, in the same order. None if elements are part of it.
        form_bytes: of memory that the form takes.
        binary: behind a form, where the elements of all inputs lie, one input after the other.
        is_own: whether `binary` is memory that nobody else uses and that may be written to.
    """

    read: Callable[[], Sequence[InputTensor]]
    form: Hashable | None = None
    form_bytes: int = 0
    binary: Buffer = b""
    is_own: bool = False


@dataclass(slots=True, eq=False)
class RequestedOutput:
    """One output that is asked for.

    Attributes:
        name: which one.
        binary: whether it shall be binary; None for the request's default.
    """

    name: str
    binary: bool | None = None


@dataclass(slots=True, eq=False)
class InferRequest:
    """One inference request.

    Attributes:
        model: its name.
        version: the one that must answer; None for the live one, or the canary.
        id: the client's name for the request, or "".
        inputs: not read yet.
        outputs: those asked for; None for all.
        binary_output: whether outputs that don't say are binary.
        timeout_ms: the deadline; None for the server's default.
        timeout_us: the same in microseconds; the earlier one counts.
        top_k: how long `order` is; None for all candidates.
        routing_key: what a canary is chosen by, or "".
    """

    model: str
    version: int | None
    id: str
    inputs: InferInputs
    outputs: Sequence[RequestedOutput] | None = None
    binary_output: bool = False
    timeout_ms: int | None = None
    timeout_us: int | None = None
    top_k: int | None = None
    routing_key: str = field(default="")

    def key(self) -> str:
        """What a canary is chosen by, or ""."""
        return self.routing_key or self.id


def input_path(name: str) -> str:
    """What errors call an input."""
    return f"inputs.{name[:MAX_NAME_CHARS]}"


def parse_version(text: str) -> int | None:
    """A version as the protocol writes it; "" asks for none.

    Raises:
        InvalidFieldError: if it is no positive integer.
    """
    if not text:
        return None
    version = int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_VERSION_CHARS else 0
    if not 1 <= version <= MAX_ID:
        raise InvalidFieldError("version", f"{text[:40]!r} is not an integer in 1..{MAX_ID}")
    return version

#!/usr/bin/env python3
"""Generates the protobuf modules; into another folder for one that is named."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OPEN_INFERENCE = Path("serving/proto/inference/open_inference.proto")
PROTOS = (Path("serving/proto/shardrank/v1/ranking.proto"), OPEN_INFERENCE)
# What `serving.proto.inference.pool` is for.
_OWN_POOL = {
    "from google.protobuf import descriptor_pool as": "from serving.proto import inference as",
    "_descriptor_pool.Default()": "_descriptor_pool.POOL",
}


def build(output: Path) -> list[Path]:
    """Write the generated modules and their type stubs below `output`, as they lie in the repository.

    Returns:
        The files, relative to `output`.

    Raises:
        RuntimeError: if protoc fails (its own message went to stderr), or generates other code than is known here.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    arguments = ["protoc", f"--proto_path={REPOSITORY}", *(str(REPOSITORY / path) for path in PROTOS)]
    for plugin in ("python_out=", "grpc_python_out=", "mypy_out=quiet:", "mypy_grpc_out=quiet:"):
        arguments.append(f"--{plugin}{output}")
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    module = output / OPEN_INFERENCE.with_name(f"{OPEN_INFERENCE.stem}_pb2.py")
    code = module.read_text(encoding="utf-8")
    for default, own in _OWN_POOL.items():
        if code.count(default) != 1:
            raise RuntimeError(f"{module.name} was expected to have {default!r} once")
        code = code.replace(default, own)
    module.write_text(code, encoding="utf-8")
    return sorted(one.relative_to(output) for path in PROTOS for one in (output / path.parent).glob("*_pb2*.py*"))


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in build(Path(sys.argv[1]) if sys.argv[1:] else REPOSITORY))

"""Generates the protobuf modules: `python -m serving.proto.build`, from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path("serving/proto/shardrank/v1")
PROTOS = ("ranking.proto", "ranking_wire.proto")


def build(output: Path) -> list[Path]:
    """Writes the generated modules and their type stubs below `output`, as they lie in the repository.

    Returns:
        The files, relative to `output`.

    Raises:
        RuntimeError: if protoc fails; its own message went to stderr.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    arguments = [
        "protoc",
        f"--proto_path={REPOSITORY}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet:{output}",
        *(str(REPOSITORY / FOLDER / name) for name in PROTOS),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    for name in PROTOS:
        if not _has_service(REPOSITORY / FOLDER / name):
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                (output / FOLDER / name.replace(".proto", suffix)).unlink(missing_ok=True)
    return sorted(path.relative_to(output) for path in (output / FOLDER).glob("*_pb2*.py*") if path.is_file())


def _has_service(proto: Path) -> bool:
    return "\nservice " in proto.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in build(REPOSITORY))

"""Look into `dense.pt2` before PyTorch reads it: what would need pickle is refused, and nothing is left to guess.

A `torch.export` archive is a zip file of JSON and raw tensors, in which four things may be pickled: weights, constants,
custom objects and sample inputs (torch/export/pt2_archive/_package.py; of the last, torch/_export/serde/serialize.py
tries `weights_only` first and goes on without). PyTorch gets a copy made of the members that were checked, without
sample inputs, so that no second reader of zip files can find other members than this one. A program is code:
`serving.models.exported` runs it only from trusted stores.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from loader.errors import ExportError, SnapshotCorruptError, cut, file_errors
from loader.snapshot.manifest import MAX_DENSE_BYTES

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Program: TypeAlias = "ExportedProgram | Path | bytes"
"""A program, or the file or the bytes of one."""

MAX_MEMBERS: Final = 65_536
MAX_JSON_BYTES: Final = 64 << 20
_PROGRAM: Final = "models/model.json"
_SAMPLE_INPUTS: Final = "data/sample_inputs/model.pt"
_CONFIGS: Final = {
    "weights": "data/weights/model_weights_config.json",
    "constants": "data/constants/model_constants_config.json",
}
_PREFIXES: Final = {"weights": "weight_", "constants": "tensor_"}
_FRAME = frozenset({"archive_format", "archive_version", "byteorder", "version", ".data/version"})
_FRAME_WRITTEN_BY_TORCH = frozenset({"byteorder", "version", ".data/version", ".data/serialization_id"})
_TENSOR = re.compile(r"data/(?:weights/weight|constants/tensor)_\d{1,6}")
# Sizes are told as text that sympy evaluates: nothing but these words, symbols such as s92, numbers and operators.
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),<>=&|~']{0,10000}")
_SYMBOL = re.compile(r"[sunz]+\d+|\d+")
_WORDS = re.compile(
    "Symbol|positive|integer|nonnegative|negative|nonzero|finite|real|True|False|Integer|Add|Mul|Pow|Mod|Max|Min|"
    "GreaterThan|LessThan|StrictGreaterThan|StrictLessThan|Equality|Unequality|"
    "FloorDiv|CeilDiv|CleanDiv|PythonMod|ModularIndexing|Where|Eq|Ne|Le|Lt|Ge|Gt|And|Or|Not|int_oo|oo"
)
# Everything else would be found by walking through PyTorch's modules, such as `torch.load`.
_TARGET = re.compile(r"(?:torch\.ops\.|_operator\.|math\.|torch\.sym_)[\w.]+|#[\w.:#]+")
# What zipfile says of an archive that is not as it should be; a name that is no UTF-8 is a ValueError.
_NOT_READ = (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError)
_INSTRUCTION = "save it with loader.snapshot.program.program_bytes, or `shardrank export --program`"


class ProgramArchive:
    """The members of a `dense.pt2`, checked, by their names below the archive's root folder.

    `where` names it in errors; with `drop_sample_inputs`, for what comes from training, these may be there, unread.
    Raises SnapshotCorruptError if it has what no program needs, or lacks what one does.
    """

    def __init__(self, content: bytes, where: str, *, drop_sample_inputs: bool = False) -> None:
        self._where, self.members = where, dict[str, zipfile.ZipInfo]()
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except _NOT_READ as error:
            raise self._refused(f"it is no zip archive: {error}") from error
        self._check_names(len(content))
        if any(name.startswith("data/aotinductor/") for name in self.members):
            problem = "it is a package that AOTInductor compiled, which is no longer served; export the program itself"
            raise self._refused(f"{problem}: {_INSTRUCTION}")
        program, sample = self._json(_PROGRAM), self.members.get(_SAMPLE_INPUTS)
        if sample is not None and sample.file_size and not drop_sample_inputs:
            raise self._refused(f"{_SAMPLE_INPUTS}: sample inputs are pickled; {_INSTRUCTION}, which leaves them out")
        stated = set[str]()
        for kind, config in _CONFIGS.items():
            if f"data/{kind}/model.pt" in self.members:
                raise self._refused(f"data/{kind}/model.pt: {kind} of the older format are pickled")
            stated |= self._check_payloads(kind, self._json(config))
        allowed = _FRAME | _FRAME_WRITTEN_BY_TORCH | stated | {_PROGRAM, _SAMPLE_INPUTS, *_CONFIGS.values()}
        if unknown := sorted(self.members.keys() - allowed):
            raise self._refused(f"member {cut(unknown[0], 200)} is none that a program has")
        if missing := sorted(stated - self.members.keys()):
            raise self._refused(f"{missing[0]} is missing")
        self._check_graph(program)

    @classmethod
    def read(cls, path: Path, *, drop_sample_inputs: bool = False) -> ProgramArchive:
        """Read a file. Raises SnapshotError."""
        with file_errors(path, "read"):
            if (size := path.stat().st_size) > MAX_DENSE_BYTES:
                problem = f"{path}: {size} bytes; at most {MAX_DENSE_BYTES} are allowed"
                raise SnapshotCorruptError(problem, kind="unsafe_program")
            content = path.read_bytes()
        return cls(content, str(path), drop_sample_inputs=drop_sample_inputs)

    def rebuilt(self) -> bytes:
        """Write an archive of the members that were checked, and none of the sample inputs."""
        # Here and below: the import takes a second and a half, which nodes of rows can do without.
        from torch.export.pt2_archive._package import PT2ArchiveWriter

        buffer = io.BytesIO()
        with PT2ArchiveWriter(buffer) as archive:
            for name in self.members:
                if name not in _FRAME_WRITTEN_BY_TORCH:
                    archive.write_bytes(name, b"" if name == _SAMPLE_INPUTS else self._member(name))
        return buffer.getvalue()

    def _member(self, name: str) -> bytes:
        try:
            return self._zip.read(self.members[name])
        except _NOT_READ as error:
            raise self._refused(f"{name}: {error}") from error

    def _check_names(self, archive_bytes: int) -> None:
        infos = self._zip.infolist()
        if not 0 < len(infos) <= MAX_MEMBERS:
            raise self._refused(f"{len(infos)} members; 1 to {MAX_MEMBERS} are allowed")
        root = infos[0].filename.partition("/")[0]
        for info in infos:
            folder, _, name = info.filename.partition("/")
            if folder != root or not name or info.filename != info.orig_filename:
                raise self._refused(f"member {cut(repr(info.filename), 200)} lies outside of its folder {root[:80]!r}")
            if name in self.members:
                raise self._refused(f"member {cut(name, 200)} is there twice")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
                raise self._refused(f"member {cut(name, 200)} is compressed or encrypted; PyTorch writes it plain")
            self.members[name] = info
        if sum(info.file_size for info in infos) > archive_bytes:
            raise self._refused("its members overlap")

    def _check_payloads(self, kind: str, config: Mapping[str, Any]) -> set[str]:
        """Return the members that a config names, none of which is pickled."""
        payloads, members = config.get("config"), set[str]()
        if not isinstance(payloads, dict):
            raise self._refused(f"{_CONFIGS[kind]}: no config of {kind}")
        for name, payload in payloads.items():
            path = payload.get("path_name") if isinstance(payload, dict) else None
            what = f"{_CONFIGS[kind]}: {cut(repr(name), 200)}"
            if isinstance(path, str) and path.startswith(("custom_obj_", "opaque_obj_")):
                raise self._refused(f"{what} is a custom object, which is pickled")
            if not isinstance(path, str) or not _TENSOR.fullmatch(f"data/{kind}/{path}"):
                raise self._refused(f"{what} lies in {cut(repr(path), 200)}, not in {_PREFIXES[kind]}<number>")
            if payload.get("use_pickle") is not False:
                raise self._refused(f"{what} is pickled; only plain tensors are read")
            if not isinstance(payload.get("tensor_meta"), dict):
                raise self._refused(f"{what} has no tensor_meta")
            members.add(f"data/{kind}/{path}")
        return members

    def _check_graph(self, program: Mapping[str, Any]) -> None:
        """Refuse expressions and targets that PyTorch would evaluate, or import, beyond what programs need."""
        waiting: list[Any] = [program]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                waiting += node.values()
                expression, target = node.get("expr_str"), node.get("target") if "inputs" in node else None
                words = re.findall(r"\w+", expression) if isinstance(expression, str) else []
                is_plain = all(_WORDS.fullmatch(word) or _SYMBOL.fullmatch(word) for word in words)
                if isinstance(expression, str) and not (_EXPRESSION.fullmatch(expression) and is_plain):
                    raise self._refused(f"{_PROGRAM}: expression {cut(repr(expression), 200)} is no arithmetic")
                if isinstance(target, str) and not _TARGET.fullmatch(target):
                    raise self._refused(f"{_PROGRAM}: operator {cut(repr(target), 200)} is none of torch.ops")

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self.members:
            raise self._refused(f"{name} is missing")
        if (size := self.members[name].file_size) > MAX_JSON_BYTES:
            raise self._refused(f"{name}: {size} bytes; at most {MAX_JSON_BYTES} are read")
        try:
            document = json.loads(self._member(name))
        except (ValueError, RecursionError) as error:
            raise self._refused(f"{name}: not JSON: {cut(error, 200)}") from error
        if not isinstance(document, dict):
            raise self._refused(f"{name}: not a JSON object")
        return document

    def _refused(self, problem: str) -> SnapshotCorruptError:
        return SnapshotCorruptError(f"{self._where}: {problem}", kind="unsafe_program")


def program_bytes(program: Program) -> bytes:
    """Return the bytes of `dense.pt2`, of a program or of a file of one.

    Sample inputs are left out unread. Raises ExportError for what no server would read.
    """
    try:
        if isinstance(program, Path):
            return ProgramArchive.read(program, drop_sample_inputs=True).rebuilt()
        if not isinstance(program, bytes):
            import torch.export

            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            program = buffer.getvalue()
        return ProgramArchive(program, "the program", drop_sample_inputs=True).rebuilt()
    except SnapshotCorruptError as error:
        raise ExportError(str(error)) from error

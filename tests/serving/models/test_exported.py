"""Exported programs: what is checked before one may score, and that it scores as the module that it was made of."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loader.errors import ExportError, SnapshotCorruptError
from loader.snapshot.manifest import ExportedModelSpec, ModelSpec
from loader.snapshot.program import ProgramArchive, program_bytes
from serving.errors import RankingModelError
from serving.models.exported import export_program, load_exported
from serving.models.inputs import RankingInputs
from shardrank_testing.errors import raises_kind
from shardrank_testing.ranking import DIM, random_inputs, ranking_spec

INPUTS: dict[str, Any] = {
    "user": {"source": "pooled", "features": ["user"], "per": "request"},
    "items": {"source": "pooled", "features": ["film", "genre"]},
    "rows": {"source": "sequence", "feature": "history"},
    "lengths": {"source": "sequence", "feature": "history", "part": "lengths"},
    "mask": {"source": "sequence", "feature": "history", "part": "mask", "per": "request"},
    "context": {"source": "context_floats"},
    "candidates": {"source": "candidate_floats"},
    "owner": {"source": "request_of_candidate"},
}
OUTPUTS = {"click": {"activation": "sigmoid", "weight": 1}, "buy": {"activation": "softplus", "weight": 4}}


class TwoTasks(nn.Module):
    """Reads everything that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4 * DIM + 5, 8)
        self.heads = nn.ModuleDict({"click": nn.Linear(8, 1), "buy": nn.Linear(8, 1)})

    def forward(
        self, user: Tensor, items: Tensor, rows: Tensor, lengths: Tensor, mask: Tensor, context: Tensor,
        candidates: Tensor, owner: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        history = rows.sum(1) / lengths.clamp(min=1).unsqueeze(1)
        is_new = (~mask.any(1)).to(items.dtype)[owner].unsqueeze(1)
        x = torch.cat([user[owner], items, history + is_new, context, candidates], dim=1)
        hidden = torch.relu(self.first(x))
        return {name: head(hidden).squeeze(1) for name, head in self.heads.items()}


def described(inputs: dict[str, Any] = INPUTS, outputs: dict[str, Any] = OUTPUTS) -> ModelSpec:
    spec = ranking_spec("target_attention")
    return spec.model_copy(update={"dense_model": ExportedModelSpec(inputs=inputs, outputs=outputs)})


def two_tasks(dtype: torch.dtype = torch.float32) -> TwoTasks:
    torch.manual_seed(3)
    return TwoTasks().to(dtype).eval()


def saved(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "dense.pt2").write_bytes(content)
    return tmp_path / "dense.pt2"


def expected_of(module: TwoTasks, inputs: RankingInputs) -> Tensor:
    owner, history = inputs.request_of_candidate, inputs.sequences["history"]
    found = module(
        inputs.context[:, :DIM], inputs.candidates[:, : 2 * DIM], history.rows[owner],
        history.mask.sum(1)[owner], history.mask, inputs.context[:, DIM : DIM + 2][owner],
        inputs.candidates[:, 2 * DIM : 2 * DIM + 3], owner,
    )  # fmt: skip
    click, buy = torch.sigmoid(found["click"].float()), torch.nn.functional.softplus(found["buy"].float())
    return torch.stack([click + 4 * buy, click, buy]).detach()


# What it computes


@pytest.fixture(scope="module")
def program() -> bytes:
    return program_bytes(export_program(described(), two_tasks()))


@pytest.fixture(scope="module")
def loaded(program, tmp_path_factory):
    return load_exported(described(), saved(tmp_path_factory.mktemp("program"), program), trusted=True)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=5), st.integers(0, 99))
def test_a_program_gives_its_modules_outputs_and_weighted_sum(loaded, requests, seed):
    inputs = random_inputs(described(), [count for count, _ in requests], [length for _, length in requests], seed)
    torch.testing.assert_close(loaded.scores(inputs), expected_of(two_tasks(), inputs), rtol=1e-5, atol=1e-5)


# What is refused


def test_a_program_is_not_read_unless_its_store_is_trusted(tmp_path):
    path = tmp_path / "dense.pt2"  # is not even there
    with raises_kind("untrusted_program", match=r"dense.pt2 is a program, .*mark it with --trust-exported"):
        load_exported(described(), path, trusted=False)


class Trace:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self.path,)


def rewritten(program: bytes, change: Callable[[dict[str, bytes]], None]) -> bytes:
    """The archive with other members."""
    with zipfile.ZipFile(BytesIO(program)) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(members)
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("described_by", "name", "says"),
    [
        ("weights", "weight_9", "'more' is pickled"),
        ("constants", "tensor_9", "'more' is pickled"),
        ("constants", "custom_obj_0", "is a custom object"),
        ("constants", "opaque_obj_0", "is a custom object"),
        ("", "sample_inputs/model.pt", "sample inputs are pickled"),
        ("", "weights/model.pt", "older format"),
        ("", "constants/model.pt", "older format"),
        ("", "state_dict.pt", "none that a program has"),
    ],
)
def test_a_pickle_in_an_archive_is_refused_and_does_not_run(described_by, name, says, program, tmp_path):
    trace, buffer = tmp_path / "trace", BytesIO()
    (pickle.dump if name.startswith("opaque") else torch.save)(Trace(trace), buffer)

    def change(members: dict[str, bytes]) -> None:
        members[f"data/{described_by}/{name}" if described_by else f"data/{name}"] = buffer.getvalue()
        if described_by:
            path = f"data/{described_by}/model_{described_by}_config.json"
            config = json.loads(members[path])
            config["config"]["more"] = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
            members[path] = json.dumps(config).encode()

    path = saved(tmp_path, rewritten(program, change))
    with raises_kind("unsafe_program", match=says):
        load_exported(described(), path, trusted=True)
    assert not trace.exists()


def in_graph(change: Callable[[str], str]) -> Callable[[dict[str, bytes]], None]:
    def changed(members: dict[str, bytes]) -> None:
        text = members["models/model.json"].decode()
        assert change(text) != text
        members["models/model.json"] = change(text).encode()

    return changed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (in_graph(lambda text: text.replace("torch.ops.aten.relu.default", "torch.load")), "is none of torch.ops"),
        (
            in_graph(lambda text: text.replace("Symbol('", "__import__('os').mkdir('", 1)),
            "is no arithmetic",
        ),
        (lambda members: members.pop("data/weights/weight_0"), "weight_0 is missing"),
        (lambda members: members.update({"models/other.json": b"{}"}), "none that a program has"),
        (lambda members: members.update({"models/model.json": b"[" * 100_000}), "not JSON"),
    ],
)
def test_what_pytorch_would_evaluate_or_miss_is_refused(program, change, says):
    with raises_kind("unsafe_program", match=says):
        ProgramArchive(rewritten(program, change), "dense.pt2")


def test_an_ambiguous_archive_is_refused(program):
    buffer = BytesIO(program)
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"other")
    with raises_kind("unsafe_program", match="is there twice"):
        ProgramArchive(buffer.getvalue(), "dense.pt2")
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/models/model.json", b"0" * 10_000)
    with raises_kind("unsafe_program", match="is compressed"):
        ProgramArchive(buffer.getvalue(), "dense.pt2")
    with pytest.raises(ExportError, match="it is no zip archive"):
        program_bytes(b"not a program")


@given(st.data())
def test_a_damaged_archive_is_refused_by_name_or_read_as_it_was(program, data):
    """Whatever is flipped: nothing but the one error, and nothing that PyTorch would have to unpickle."""
    damaged = bytearray(program)
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        archive = ProgramArchive(bytes(damaged), "dense.pt2")
        rebuilt = archive.rebuilt()
    except SnapshotCorruptError:
        return
    ProgramArchive(rebuilt, "rebuilt")


class OfItems(nn.Module):
    """Computes its outputs of one argument."""

    def __init__(self, compute: Callable[[Tensor], Any] = lambda items: items.sum(1)) -> None:
        super().__init__()
        self.compute, self.norm = compute, nn.BatchNorm1d(DIM)

    def forward(self, items: Tensor) -> Any:
        return self.compute(items)


def linear_of(number: float) -> nn.Linear:
    linear = nn.Linear(DIM, 1)
    nn.init.constant_(linear.bias, number)
    return linear


ITEMS = {"items": {"source": "pooled", "features": ["film"]}}
CLICK = {"click": {}}


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda items: (items - items.mean(0)).sum(1), "output the score of a candidate changes by"),
        (
            lambda items: items.reshape(16, DIM).sum(1),
            "argument 'items', dim 0 is always 16; it is the number of candidates, which varies",
        ),
        (
            lambda items: items.reshape(-1, 2, DIM).sum(2).reshape(-1),
            "the exported program fails: RuntimeError: shape",
        ),
        (lambda items: items.sum(), r"output 'click' is \[\]; it must have one value a candidate"),
        (lambda items: items.log().sum(1), "is not finite for inputs drawn at random"),
        (lambda items: (items.sum(1), items.sum(1)), r"returns 2 outputs; the description names \['click'\]"),
        (linear_of(float("nan")), "the program's tensor 'compute.bias' holds NaN or inf"),
        (lambda items: {"buy": items.sum(1)}, r"the program returns \['buy'\]; the description names \['click'\]"),
    ],
)
def test_a_program_that_does_not_fit_is_refused_with_the_reason(compute, says, tmp_path):
    spec = described(ITEMS, CLICK)
    path = saved(tmp_path, program_bytes(export_program(spec, OfItems(compute))))
    with pytest.raises(RankingModelError, match=says):
        load_exported(spec, path, trusted=True)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"things": ITEMS["items"]}, "argument 'items' that inputs do not say"),
        ({**ITEMS, "more": {"source": "candidate_floats"}}, "no argument 'more', which inputs say"),
        ({"items": {"source": "pooled", "features": ["film", "genre"]}}, "argument 'items', dim 1 is 4; it gets 8"),
        ({"items": {"source": "sequence", "feature": "history"}}, "has 2 dims; it gets"),
        ({"items": {"source": "request_of_candidate"}}, "is torch.float32; it gets torch.int64"),
        ({"items": {"source": "pooled", "features": ["history"]}}, "'history' is none of the pooled features"),
        ({"items": {"source": "pooled", "features": ["user", "film"]}}, "are of both sides"),
        ({"items": {"source": "sequence", "feature": "film"}}, r"'film' is no sequence .* they are \['history'\]"),
        ({"items": {"source": "pooled", "features": ["film"], "per": "request"}}, "can't come per request"),
    ],
)
def test_arguments_are_bound_by_name_and_checked(inputs, says, tmp_path):
    path = saved(tmp_path, program_bytes(export_program(described(ITEMS, CLICK), OfItems())))
    with pytest.raises(RankingModelError, match=says):
        load_exported(described(inputs, CLICK), path, trusted=True)

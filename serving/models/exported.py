"""Ranking by a program of the user's own, one of `torch.export`, run as it is.

What its arguments get and what its outputs mean stands in the model's description (`ExportedModelSpec`). A program is
checked before it may score: that each argument and output is there under its name, in the right shape and for any
number of candidates, and by a trial: requests together and each of them alone must get the same outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.manifest import (
    CandidateFloats,
    ContextFloats,
    ExportedModelSpec,
    InputSource,
    ModelSpec,
    PooledInput,
    RequestOfCandidate,
    SequenceSource,
    SideInput,
)
from loader.snapshot.program import Program, ProgramArchive, program_bytes
from serving.errors import RankingModelError
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput, SideShapes
from serving.models.layers import NumberFormat, can_pack
from serving.models.ranking_models import BLOCK_ROWS, MAX_PAIRS, RankingModel

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""Calls a program: its arguments in its own order, its outputs in theirs."""

MIN_SEQUENCE: Final = 2
"""Rows that sequences are filled up to, with zeros: programs are exported for 2 and more."""
LEAST_UPPER_BOUND: Final = 1 << 20
TRIAL_CANDIDATES: Final = (5, 1, 10)
"""Of the requests of a trial; 16 together, as servers round up to."""
TRIAL_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""How far outputs of requests together may be from those of each alone, of the larger of 1 and themselves."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp": torch.exp,
}
_FORMATS: dict[torch.dtype, NumberFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class ExportedRanking(RankingModel):
    """A dense part that is a program, on the CPU, called with at most `max_pairs` at once. Made by `load_exported`."""

    def __init__(self, spec: ModelSpec, bindings: Sequence[Binding], run: Run, dtype: torch.dtype) -> None:
        """Take a program whose arguments get `bindings`, floats in `dtype`."""
        super().__init__(InputShapes.of(spec))
        self.number_format = _FORMATS[dtype]
        self.max_pairs = MAX_PAIRS
        self._bindings, self._run = tuple(bindings), run
        self._outputs = tuple(_exported(spec).outputs.values())

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return the weighted sum of the outputs, float32 [N], without gradients."""
        return self.scores(inputs)[0]

    score = forward

    def scores(self, inputs: RankingInputs) -> Tensor:
        """Return that sum, and below it each output after its activation: float32 [1 + outputs, N], no gradients."""
        with torch.inference_mode():
            parts = [self._scores(part) for part in _divided(_with_rows(inputs), self.max_pairs)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _scores(self, inputs: RankingInputs) -> Tensor:
        found = self._run([bind(inputs) for bind in self._bindings])
        count = inputs.candidates.shape[0]
        rows = torch.zeros(1 + len(self._outputs), count)
        for number, (output, told) in enumerate(zip(found, self._outputs, strict=True), start=1):
            if output.numel() != count:
                raise RankingModelError(f"output {number} of the program has {output.numel()} values for {count}")
            rows[number] = _ACTIVATIONS[told.activation](output.reshape(count).float())
            rows[0].add_(rows[number], alpha=told.weight)
        return rows

    def pack(self, number_format: NumberFormat) -> None:
        """Do nothing: a program is in the number format that it was exported in."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse to be copied to another device."""
        raise RankingModelError("an exported program is run on the CPU; keep its rows in RAM or on shard nodes")


Binding: TypeAlias = Callable[[RankingInputs], Tensor]


def load_exported(spec: ModelSpec, path: Path, *, trusted: bool) -> ExportedRanking:
    """Load a version's `dense.pt2`, checked and ready to score.

    Raises:
        RankingModelError: it is not `trusted`; nothing was read.
        SnapshotCorruptError: pickle would be needed; PyTorch has not read it.
        RankingModelError: it does not fit the description.
    """
    if not trusted:
        raise RankingModelError(
            f"model {spec.model!r}: {path.name} is a program, which can do whatever this process can; if you trust "
            "who writes to the store, mark it with --trust-exported",
            kind="untrusted_program",
        )
    return _checked(spec, ProgramArchive.read(path))


def check_program(spec: ModelSpec, program: Program) -> None:
    """Check that a program would serve, as a server does. Raises as `load_exported`, and ExportError."""
    _checked(spec, ProgramArchive(program_bytes(program), "dense.pt2"))


def _checked(spec: ModelSpec, archive: ProgramArchive) -> ExportedRanking:
    try:
        model = _loaded_program(spec, archive)
        _check_by_trial(spec, model)
    except RankingModelError:
        raise
    except Exception as error:
        # PyTorch raises whatever it meets, and so does the program.
        problem = f"{type(error).__name__}: {str(error)[:1000]}"
        raise RankingModelError(f"model {spec.model!r}: the exported program fails: {problem}") from error
    return model


def _exported(spec: ModelSpec) -> ExportedModelSpec:
    if not isinstance(spec.dense_model, ExportedModelSpec):
        raise RankingModelError(f"model {spec.model!r}: dense_model {spec.dense_model.kind!r} is no exported program")
    return spec.dense_model


# Programs


def _loaded_program(spec: ModelSpec, archive: ProgramArchive) -> ExportedRanking:
    """Read a program from what was checked, and prepare its graph to be called without PyTorch's own checks of it."""
    from torch.export.pt2_archive._package import load_pt2

    program: ExportedProgram = load_pt2(BytesIO(archive.rebuilt())).exported_programs["model"]
    dtype = _check_signature(spec, program)
    signature = program.graph_signature
    tensors = {**program.state_dict, **program.constants}
    held: list[Tensor] = []
    for name in (one.target for one in signature.input_specs if one.kind.name != "USER_INPUT"):
        if name is None or not isinstance(tensor := tensors.get(name), Tensor):
            raise RankingModelError(f"model {spec.model!r}: the program has no tensor {name!r}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RankingModelError(f"model {spec.model!r}: the program's tensor {name!r} holds NaN or inf")
        held.append(tensor.detach())
    inputs = [_exported(spec).inputs[str(name)] for name in signature.user_inputs]
    graph, bindings = program.graph_module, [_binding(spec, source, dtype) for source in inputs]
    _pack_products(graph, held)
    order = _output_order(spec, program.call_spec.out_spec)

    def run(arguments: list[Tensor]) -> list[Tensor]:
        outputs = graph(*held, *arguments)
        return [outputs[number] for number in order]

    return ExportedRanking(spec, bindings, run, dtype)


def _pack_products(graph: GraphModule, held: Sequence[Tensor]) -> None:
    """Have products with the program's own weights made by oneDNN from weights in its order, with a ReLU that follows.

    As `PackedProduct` does for built-in models: 5 to 13 % of a program's time (docs/decisions/dense-models.md).
    """
    aten, nodes = torch.ops.aten, graph.graph
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    weights = {node: tensor for node, tensor in zip(inputs, held, strict=False) if tensor.dim() == 2}

    def packed(weight: Tensor) -> Node:
        name = f"_packed_{len(list(graph.buffers()))}"
        graph.register_buffer(name, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), persistent=False)
        return nodes.get_attr(name)

    for node in list(nodes.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            # What it asserts was checked with the arguments.
            nodes.erase_node(node)
            continue
        if node.target not in (aten.linear.default, aten.addmm.default):
            continue
        if node.target is aten.linear.default:
            x, of, more = node.args[0], node.args[1], None
            bias = node.args[2] if len(node.args) > 2 else None
        else:
            (more, x, transposed), bias = node.args[:3], None
            is_plain = transposed.target in (aten.t.default, aten.numpy_T.default) and not node.kwargs
            of = transposed.args[0] if is_plain else None
        weight = weights.get(of) if isinstance(of, Node) else None
        if weight is None or not can_pack(weight):
            continue
        users = list(node.users)
        relu = users[0] if len(users) == 1 and users[0].target in (aten.relu.default, aten.relu_.default) else None
        with nodes.inserting_before(node):
            how = "relu" if relu is not None and more is None else "none"
            made = nodes.call_function(
                torch.ops.mkldnn._linear_pointwise.default, (x, packed(weight), bias, how, [], "")
            )
            if more is not None:
                # The product is nobody else's: it is written in place.
                made = nodes.call_function(aten.add_.Tensor, (made, more))
                made = made if relu is None else nodes.call_function(aten.relu_.default, (made,))
        for old in (node,) if relu is None else (relu, node):
            old.replace_all_uses_with(made)
            nodes.erase_node(old)
    nodes.eliminate_dead_code()
    graph.recompile()


def _check_signature(spec: ModelSpec, program: ExportedProgram) -> torch.dtype:
    """Check arguments and outputs by their shapes; returns the dtype of the floats. Raises RankingModelError."""
    prefix, signature = f"model {spec.model!r}: the program", program.graph_signature
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = [str(name) for name in signature.user_inputs]
    inputs = _exported(spec).inputs
    if missing := [name for name in names if name not in inputs]:
        raise RankingModelError(f"{prefix} has an argument {missing[0]!r} that inputs do not say; they are {[*inputs]}")
    if unknown := [name for name in inputs if name not in names]:
        raise RankingModelError(f"{prefix} has no argument {unknown[0]!r}, which inputs say; it has {names}")
    if other := [one.kind.name for one in signature.output_specs if one.kind.name != "USER_OUTPUT"]:
        raise RankingModelError(f"{prefix} changes its own tensors ({other[0]}); export it in eval mode")
    floats: set[torch.dtype] = set()
    for name in names:
        value, (dtype, shape) = nodes[name], _expected(spec, inputs[name])
        if not isinstance(value, Tensor):
            raise RankingModelError(f"{prefix}: argument {name!r} is no tensor")
        given = value.dtype
        if dtype is not given and not (dtype.is_floating_point and given in _FORMATS):
            raise RankingModelError(f"{prefix}: argument {name!r} is {given}; it gets {dtype}, or bfloat16 for float32")
        floats |= {given} if dtype.is_floating_point else set()
        if value.dim() != len(shape):
            raise RankingModelError(f"{prefix}: argument {name!r} has {value.dim()} dims; it gets {list(shape)}")
        for dim, (got, wanted) in enumerate(zip(value.shape, shape, strict=True)):
            where = f"argument {name!r}, dim {dim}"
            if isinstance(wanted, str):
                _check_dynamic(prefix, where, got, wanted, program)
            elif not isinstance(got, int) or got != wanted:
                raise RankingModelError(f"{prefix}: {where} is {got}; it gets {wanted}")
    _check_outputs(spec, [nodes[str(name)] for name in signature.user_outputs])
    if len(floats) != 1:
        raise RankingModelError(f"{prefix} takes floats of {sorted(map(str, floats))}; it must be one of the dtypes")
    return floats.pop()


def _check_dynamic(prefix: str, where: str, got: Any, wanted: str, program: ExportedProgram) -> None:
    """Check a size that varies: it is a symbol, without conditions or bounds."""
    meaning = {"N": "the number of candidates", "R": "the number of requests", "L": "the longest sequence"}
    advice = "export it with dynamic_shapes that say torch.export.Dim.AUTO or Dim(...) for it"
    if isinstance(got, int):
        raise RankingModelError(
            f"{prefix}: {where} is always {got}; it is {meaning[wanted[0]]}, which varies: {advice}"
        )
    expression = got.node.expr
    if not expression.is_Symbol:
        raise RankingModelError(f"{prefix}: {where} must be {expression}; it may have no conditions: {advice}")
    bounds = program.range_constraints.get(expression)
    if bounds is not None and (bounds.lower > MIN_SEQUENCE or bounds.upper < LEAST_UPPER_BOUND):
        allowed = f"it must be taken from {MIN_SEQUENCE} to {LEAST_UPPER_BOUND} and beyond"
        raise RankingModelError(f"{prefix}: {where} is bound to {bounds.lower}..{bounds.upper}; {allowed}")


def _check_outputs(spec: ModelSpec, values: Sequence[Any]) -> None:
    names, prefix = list(_exported(spec).outputs), f"model {spec.model!r}: the program"
    if len(values) != len(names):
        raise RankingModelError(f"{prefix} returns {len(values)} outputs; the description names {names}")
    for name, value in zip(names, values, strict=True):
        is_one = isinstance(value, Tensor) and value.dim() in (1, 2) and (value.dim() == 1 or value.shape[1] == 1)
        if not is_one or isinstance(value.shape[0], int):
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RankingModelError(f"{prefix}: output {name!r} is {got}; it must have one value a candidate, [N]")


# Arguments and outputs


def _output_order(spec: ModelSpec, out_spec: Any) -> list[int]:
    """Find the position of each described output among the program's: by name if it returns a dict, else in order."""
    names = list(_exported(spec).outputs)
    if out_spec.type is not dict:
        return list(range(len(names)))
    if sorted(out_spec.context) != sorted(names):
        returned = list(out_spec.context)
        raise RankingModelError(f"model {spec.model!r}: the program returns {returned}; the description names {names}")
    return [out_spec.context.index(name) for name in names]


def check_bindings(spec: ModelSpec) -> None:
    """Check that what arguments get is there: features, their sides and poolings. Raises RankingModelError."""
    for source in _exported(spec).inputs.values():
        _expected(spec, source)


def _columns(
    spec: ModelSpec, source: SideInput | PooledInput | ContextFloats | CandidateFloats
) -> tuple[bool, list[slice]]:
    """Return whether an argument gets columns of the context, and which. Raises RankingModelError."""
    shapes, prefix = InputShapes.of(spec), f"model {spec.model!r}: inputs"
    match source:
        case PooledInput():
            if unknown := [name for name in source.features if name not in shapes.features]:
                known = list(shapes.features)
                raise RankingModelError(f"{prefix}: {unknown[0]!r} is none of the pooled features; they are {known}")
            sides = {spec.feature(name).side for name in source.features}
            if len(sides) != 1:
                raise RankingModelError(
                    f"{prefix}: {list(source.features)} are of both sides; give each side an argument"
                )
            what, is_context = "pooled", sides == {"context"}
            pieces = list(map((shapes.context if is_context else shapes.candidate).columns_of, source.features))
        case SideInput():
            what, is_context = f"side {source.side}", source.side == "context"
            pieces = [slice(0, shapes.side(source.side).padded_width)]
        case _:
            what, is_context = source.source, isinstance(source, ContextFloats)
            pieces = [(shapes.context if is_context else shapes.candidate).dense_columns]
    if not is_context and getattr(source, "per", "candidate") == "request":
        raise RankingModelError(f"{prefix}: {what} of candidates can't come per request")
    if not sum(piece.stop - piece.start for piece in pieces):
        raise RankingModelError(f"{prefix}: the model has no {what}")
    return is_context, pieces


def _expected(spec: ModelSpec, source: InputSource) -> tuple[torch.dtype, tuple[int | str, ...]]:
    """Return dtype and shape of what an argument gets: "N", "R" and "L <feature>" vary. Raises RankingModelError."""
    rows = "R" if getattr(source, "per", "candidate") == "request" else "N"
    if isinstance(source, RequestOfCandidate):
        return torch.int64, (rows,)
    if not isinstance(source, SequenceSource):
        return torch.float32, (rows, sum(piece.stop - piece.start for piece in _columns(spec, source)[1]))
    dims = InputShapes.of(spec).sequence_dims
    if source.feature not in dims:
        raise RankingModelError(
            f"model {spec.model!r}: inputs: {source.feature!r} is no sequence (pooling none); they are {list(dims)}"
        )
    longest = f"L {source.feature}"
    if source.part == "lengths":
        return torch.int64, (rows,)
    if source.part == "mask":
        return torch.bool, (rows, longest)
    return torch.float32, (rows, longest, dims[source.feature])


def _binding(spec: ModelSpec, source: InputSource, dtype: torch.dtype) -> Binding:
    """Return what reads an argument from a batch's inputs, contiguous as programs expect it."""
    if isinstance(source, RequestOfCandidate):
        return lambda inputs: inputs.request_of_candidate
    if isinstance(source, SequenceSource):
        name, part, is_gathered = source.feature, source.part, source.per == "candidate"

        def read(inputs: RankingInputs) -> Tensor:
            sequence = inputs.sequences[name]
            if part == "rows":
                return sequence.rows
            return sequence.mask if part == "mask" else sequence.mask.sum(1)

    else:
        is_context, pieces = _columns(spec, source)
        is_gathered = is_context and getattr(source, "per", "candidate") == "candidate"
        merged: list[slice] = []
        for piece in pieces:
            # Neighbours are one piece.
            start = merged.pop().start if merged and merged[-1].stop == piece.start else piece.start
            merged.append(slice(start, piece.stop))

        def read(inputs: RankingInputs) -> Tensor:
            matrix = inputs.context if is_context else inputs.candidates
            found = [matrix[:, piece] for piece in merged]
            return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).to(dtype)

    def bind(inputs: RankingInputs) -> Tensor:
        found = read(inputs)
        return (found.index_select(0, inputs.request_of_candidate) if is_gathered else found).contiguous()

    return bind


def _with_rows(inputs: RankingInputs) -> RankingInputs:
    """Fill sequences up with rows of zeros where all of a batch are shorter than programs take."""
    short = {name: one for name, one in inputs.sequences.items() if one.mask.shape[1] < MIN_SEQUENCE}
    if not short:
        return inputs
    filled = {
        name: SequenceInput(
            F.pad(one.rows, (0, 0, 0, MIN_SEQUENCE - one.mask.shape[1])),
            F.pad(one.mask, (0, MIN_SEQUENCE - one.mask.shape[1])),
        )
        for name, one in short.items()
    }
    return replace(inputs, sequences={**inputs.sequences, **filled})


def _divided(inputs: RankingInputs, max_pairs: int) -> Iterator[RankingInputs]:
    """Divide a batch into neighbouring candidates, with their requests, that make at most `max_pairs` pairs."""
    owner = inputs.request_of_candidate
    longest = max((one.mask.shape[1] for one in inputs.sequences.values()), default=0)
    # Copies of built-in models fill up each request's last block.
    most_rows = owner.numel() + (BLOCK_ROWS - 1) * inputs.context.shape[0]
    if most_rows * longest <= max_pairs or not inputs.is_ordered or not owner.numel():
        return iter((inputs,))
    filled = torch.arange(owner.numel()) + (BLOCK_ROWS - 1) * owner
    part = filled // max(1, max_pairs // longest)
    return inputs.split(torch.unique_consecutive(part, return_counts=True)[1].tolist())


# The trial


def _check_by_trial(spec: ModelSpec, model: ExportedRanking) -> None:
    """Compare requests scored together with each alone: outputs must be finite, and no other request's affair."""
    inputs = _trial_inputs(model.shapes, model.dtype)
    together = model.scores(inputs)
    names = ["the score", *(repr(name) for name in _exported(spec).outputs)]
    alone = torch.cat([model.scores(one) for one in inputs.split(TRIAL_CANDIDATES)], dim=1)
    for name, one, other in zip(names, together, alone, strict=True):
        if not bool(one.isfinite().all()) or not bool(other.isfinite().all()):
            raise RankingModelError(f"model {spec.model!r}: output {name} is not finite for inputs drawn at random")
        difference = float(((one - other).abs() / one.abs().clamp(min=1)).max())
        if difference > TRIAL_TOLERANCE[model.dtype]:
            raise RankingModelError(
                f"model {spec.model!r}: output {name} of a candidate changes by {difference:.2g} with the requests it "
                "is scored with; a program must treat each candidate by itself (in eval mode, no batch statistics)"
            )


def _trial_inputs(shapes: InputShapes, dtype: torch.dtype) -> RankingInputs:
    draw = torch.Generator().manual_seed(0)

    def matrix(side: SideShapes, rows: int) -> Tensor:
        return F.pad(torch.randn(rows, side.width, generator=draw), (0, side.padded_width - side.width)).to(dtype)

    requests, candidates = len(TRIAL_CANDIDATES), sum(TRIAL_CANDIDATES)
    mask = torch.arange(4) < torch.tensor([[4], [0], [2]])
    sequences = {
        name: SequenceInput((torch.randn(requests, 4, dim, generator=draw) * mask[:, :, None]).to(dtype), mask)
        for name, dim in shapes.sequence_dims.items()
    }
    owner = torch.repeat_interleave(torch.arange(requests), torch.tensor(TRIAL_CANDIDATES))
    context, rows = matrix(shapes.context, requests), matrix(shapes.candidate, candidates)
    return RankingInputs(context, rows, sequences, owner, is_ordered=True)


def export_program(spec: ModelSpec, module: nn.Module, dtype: torch.dtype = torch.float32) -> ExportedProgram:
    """Export a module whose `forward` takes the inputs that the description says, by name, for any number of each.

    Floats come in `dtype`, the module's own. Raises RankingModelError if inputs do not fit the model's features, and
    whatever `torch.export` does.
    """
    # Sizes that differ from one another, so that none is taken for another.
    inputs = _trial_inputs(InputShapes.of(spec), dtype)
    arguments: dict[str, Tensor] = {}
    dynamic: dict[str, dict[int, Any]] = {}
    for name, source in _exported(spec).inputs.items():
        _, shape = _expected(spec, source)
        arguments[name] = _binding(spec, source, dtype)(inputs)
        dynamic[name] = {dim: torch.export.Dim.AUTO for dim, size in enumerate(shape) if isinstance(size, str)}
    with torch.no_grad():
        return torch.export.export(module.eval(), (), arguments, dynamic_shapes=dynamic, strict=False)

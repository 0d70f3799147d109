"""Ranking by a user's program of `torch.export`, whose arguments and outputs `ExportedModelSpec` describes.

A program is checked before it may score: that each argument and output has its name, its shape and any number of
candidates, and by a trial: requests together and each of them alone must get the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F  # noqa: N812

from loader.snapshot import manifest
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.program import Program, ProgramArchive, program_bytes
from serving.description import NumberFormat
from serving.errors import RankingModelError
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput
from serving.models.layers import can_pack
from serving.models.ranking_models import MAX_PAIRS, RankingModel

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

Run: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""Calls a program with its arguments, in its order; returns the outputs in the order of the description."""
Binding: TypeAlias = Callable[[RankingInputs], Tensor]
"""Reads an argument from a batch's inputs."""
_Shape: TypeAlias = tuple[int | str, ...]
"""Of an argument: "N" candidates, "R" requests and "L <feature>" rows of the longest sequence vary."""

MIN_SEQUENCE: Final = 2
"""Rows that sequences are filled up to, with zeros: programs are exported for 2 and more."""
LEAST_UPPER_BOUND: Final = 1 << 20
TRIAL_CANDIDATES: Final = (5, 1, 10)
"""Of the requests of a trial; 16 together, as servers round up to."""
TRIAL_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Largest difference of outputs together and alone, relative to the larger of 1 and themselves."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp": torch.exp,
}
_FORMATS: dict[torch.dtype, NumberFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Argument(NamedTuple):
    dtype: torch.dtype
    shape: _Shape
    bind: Binding


class ExportedRanking(RankingModel):
    """A program on the CPU, called with at most `MAX_PAIRS` at once. Made by `load_exported`."""

    def __init__(self, spec: ModelSpec, bindings: Sequence[Binding], run: Run, dtype: torch.dtype) -> None:
        super().__init__(InputShapes.of(spec))
        self.number_format = _FORMATS[dtype]
        self._bindings, self._run = tuple(bindings), run
        self._outputs = tuple(_exported(spec).outputs.values())

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Return the weighted sum of the outputs, float32 [N]."""
        return self.scores(inputs)[0]

    def scores(self, inputs: RankingInputs) -> Tensor:
        """Return the weighted sum of the outputs, and below it each after its activation: float32 [1 + outputs, N]."""
        sequences = dict(inputs.sequences)
        for name, (rows, mask) in inputs.sequences.items():
            if (missing := MIN_SEQUENCE - mask.shape[1]) > 0:
                sequences[name] = SequenceInput(F.pad(rows, (0, 0, 0, missing)), F.pad(mask, (0, missing)))
        inputs, count = inputs._replace(sequences=sequences), inputs.request_of_candidate.numel()
        longest = max((mask.shape[1] for _, mask in sequences.values()), default=1)
        size = max(1, MAX_PAIRS // longest)
        if count <= size or not inputs.is_ordered:
            return self._scores(inputs)
        sizes = [min(size, count - first) for first in range(0, count, size)]
        return torch.cat([self._scores(part) for part in inputs.split(sizes)], dim=1)

    def _scores(self, inputs: RankingInputs) -> Tensor:
        outputs = self._run([bind(inputs) for bind in self._bindings])
        count = inputs.candidates.shape[0]
        rows = torch.zeros(1 + len(self._outputs), count)
        for number, (output, described) in enumerate(zip(outputs, self._outputs, strict=True), start=1):
            rows[number] = _ACTIVATIONS[described.activation](output.reshape(count).float())
            rows[0].add_(rows[number], alpha=described.weight)
        return rows


def load_exported(spec: ModelSpec, path: Path, *, trusted: bool) -> ExportedRanking:
    """Load a version's `dense.pt2`, checked and ready to score.

    Raises:
        RankingModelError: it is not `trusted`, and was not read; or it does not fit the description.
        SnapshotCorruptError: pickle would be needed; PyTorch has not read it.
    """
    if not trusted:
        advice = "if you trust who writes to the store, mark it with --trust-exported"
        problem = f"{path.name} is a program, which can do whatever this process can; {advice}"
        raise RankingModelError(f"model {spec.model!r}: {problem}", kind="untrusted_program")
    return _checked(spec, ProgramArchive.read(path))


def check_program(spec: ModelSpec, program: Program) -> None:
    """Check that a program would serve, as a server does. Raises as `load_exported`, and ExportError."""
    _checked(spec, ProgramArchive(program_bytes(program), "dense.pt2"))


def _checked(spec: ModelSpec, archive: ProgramArchive) -> ExportedRanking:
    try:
        with torch.inference_mode():
            model = _loaded_program(spec, archive)
            _check_by_trial(spec, model)
        return model
    except RankingModelError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:1000]}"
        raise RankingModelError(f"model {spec.model!r}: the exported program fails: {problem}") from error


def _exported(spec: ModelSpec) -> manifest.ExportedModelSpec:
    if not isinstance(spec.dense_model, manifest.ExportedModelSpec):
        raise RankingModelError(f"model {spec.model!r}: dense_model {spec.dense_model.kind!r} is no exported program")
    return spec.dense_model


def _loaded_program(spec: ModelSpec, archive: ProgramArchive) -> ExportedRanking:
    """Read a checked program, and prepare its graph to be called without PyTorch's checks."""
    from torch.export.pt2_archive._package import load_pt2

    program: ExportedProgram = load_pt2(BytesIO(archive.rebuilt())).exported_programs["model"]
    dtype = _check_signature(spec, program)
    order, signature = _output_order(spec, program), program.graph_signature
    tensors = {**program.state_dict, **program.constants}
    constants: list[Tensor] = []
    for name in (argument.target for argument in signature.input_specs if argument.kind.name != "USER_INPUT"):
        if name is None or not isinstance(tensor := tensors.get(name), Tensor):
            raise RankingModelError(f"model {spec.model!r}: the program has no tensor {name!r}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RankingModelError(f"model {spec.model!r}: the program's tensor {name!r} holds NaN or inf")
        constants.append(tensor.detach())
    bindings = [_argument(spec, _exported(spec).inputs[str(name)]).bind for name in signature.user_inputs]
    graph = program.graph_module
    _pack_products(graph, constants)

    def run(arguments: list[Tensor]) -> list[Tensor]:
        outputs = graph(*constants, *arguments)
        return [outputs[number] for number in order]

    return ExportedRanking(spec, bindings, run, dtype)


def _pack_products(graph: GraphModule, constants: Sequence[Tensor]) -> None:
    """Have products with the program's weights, and a ReLU that follows, made by oneDNN as `PackedProduct` does.

    That is 5 to 13 % of a program's time (docs/decisions/dense-models.md).
    """
    aten, nodes = torch.ops.aten, graph.graph
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    weights = {node: tensor for node, tensor in zip(inputs, constants, strict=False) if tensor.dim() == 2}
    for number, node in enumerate(list(nodes.nodes)):
        if node.target is aten._assert_tensor_metadata.default:
            # What it asserts was checked with the arguments.
            nodes.erase_node(node)
            continue
        if node.target is aten.linear.default:
            x, source, bias, more = (*node.args, None, None)[:4]
        elif node.target is aten.addmm.default and not node.kwargs:
            (more, x, transposed), bias = node.args, None
            source = transposed.args[0] if transposed.target in (aten.t.default, aten.numpy_T.default) else None
        else:
            continue
        weight = weights.get(source) if isinstance(source, Node) else None
        if weight is None or not can_pack(weight):
            continue
        users = list(node.users)
        relu = users[0] if len(users) == 1 and users[0].target in (aten.relu.default, aten.relu_.default) else None
        graph.register_buffer(
            f"_packed_{number}", torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), persistent=False
        )
        with nodes.inserting_before(node):
            activation = "relu" if relu is not None and more is None else "none"
            arguments: tuple[Any, ...] = (x, nodes.get_attr(f"_packed_{number}"), bias, activation, [], "")
            product = nodes.call_function(torch.ops.mkldnn._linear_pointwise.default, arguments)
            if more is not None:
                # Nothing else reads the product: it is overwritten.
                product = nodes.call_function(aten.add_.Tensor, (product, more))
                product = product if relu is None else nodes.call_function(aten.relu_.default, (product,))
        for old in (node,) if relu is None else (relu, node):
            old.replace_all_uses_with(product)
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
    if other := [output.kind.name for output in signature.output_specs if output.kind.name != "USER_OUTPUT"]:
        raise RankingModelError(f"{prefix} changes its own tensors ({other[0]}); export it in eval mode")
    floats: set[torch.dtype] = set()
    for name in names:
        value, (dtype, shape, _) = nodes[name], _argument(spec, inputs[name])
        if not isinstance(value, Tensor):
            raise RankingModelError(f"{prefix}: argument {name!r} is no tensor")
        given = value.dtype
        if dtype is not given and not (dtype.is_floating_point and given in _FORMATS):
            raise RankingModelError(f"{prefix}: argument {name!r} is {given}; it gets {dtype}, or bfloat16 for float32")
        floats |= {given} if dtype.is_floating_point else set()
        if value.dim() != len(shape):
            raise RankingModelError(f"{prefix}: argument {name!r} has {value.dim()} dims; it gets {list(shape)}")
        for dim, (got, expected) in enumerate(zip(value.shape, shape, strict=True)):
            if problem := _size_problem(got, expected, program):
                raise RankingModelError(f"{prefix}: argument {name!r}, dim {dim} {problem}")
    if len(floats) != 1:
        raise RankingModelError(f"{prefix} takes floats of {sorted(map(str, floats))}; it must be one of the dtypes")
    return floats.pop()


def _size_problem(got: Any, expected: int | str, program: ExportedProgram) -> str:
    """Return why an argument's size won't do, or "": one that varies is a symbol, without conditions or bounds."""
    if isinstance(expected, int):
        return "" if isinstance(got, int) and got == expected else f"is {got}; it gets {expected}"
    advice = "export it with dynamic_shapes that say torch.export.Dim.AUTO or Dim(...) for it"
    if isinstance(got, int):
        meaning = {"N": "the number of candidates", "R": "the number of requests", "L": "the longest sequence"}
        return f"is always {got}; it is {meaning[expected[0]]}, which varies: {advice}"
    expression = got.node.expr
    if not expression.is_Symbol:
        return f"must be {expression}; it may have no conditions: {advice}"
    bounds = program.range_constraints.get(expression)
    if bounds is not None and (bounds.lower > MIN_SEQUENCE or bounds.upper < LEAST_UPPER_BOUND):
        allowed = f"it must be taken from {MIN_SEQUENCE} to {LEAST_UPPER_BOUND} and beyond"
        return f"is bound to {bounds.lower}..{bounds.upper}; {allowed}"
    return ""


def _output_order(spec: ModelSpec, program: ExportedProgram) -> list[int]:
    """Return the index of each described output in the program's: by name if it returns a dict, else in order.

    Raises RankingModelError for other outputs, or one that is not a value a candidate.
    """
    names, prefix, structure = list(_exported(spec).outputs), f"model {spec.model!r}: the program", program.call_spec
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    values = [nodes[str(name)] for name in program.graph_signature.user_outputs]
    if len(values) != len(names):
        raise RankingModelError(f"{prefix} returns {len(values)} outputs; the description names {names}")
    for name, value in zip(names, values, strict=True):
        is_column = isinstance(value, Tensor) and value.dim() in (1, 2) and (value.dim() == 1 or value.shape[1] == 1)
        if not is_column or isinstance(value.shape[0], int):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RankingModelError(f"{prefix}: output {name!r} is {shape}; it must have one value a candidate, [N]")
    returned = list(structure.out_spec.context) if structure.out_spec.type is dict else names
    if sorted(returned) != sorted(names):
        raise RankingModelError(f"{prefix} returns {returned}; the description names {names}")
    return [returned.index(name) for name in names]


def check_bindings(spec: ModelSpec) -> None:
    """Check that what arguments get is there: features, their sides and poolings. Raises RankingModelError."""
    for source in _exported(spec).inputs.values():
        _argument(spec, source)


def _argument(spec: ModelSpec, source: manifest.InputSource) -> _Argument:
    shapes, prefix = InputShapes.of(spec), f"model {spec.model!r}: inputs"
    is_gathered = getattr(source, "per", "candidate") == "candidate"
    rows = "N" if is_gathered else "R"
    if isinstance(source, manifest.RequestOfCandidate):
        return _Argument(torch.int64, (rows,), lambda inputs: inputs.request_of_candidate.contiguous())
    if isinstance(source, manifest.SequenceSource):
        name, dims = source.feature, shapes.sequence_dims
        if name not in dims:
            raise RankingModelError(f"{prefix}: {name!r} is no sequence (pooling none); they are {list(dims)}")
        longest = f"L {name}"
        parts: dict[str, tuple[torch.dtype, _Shape, Callable[[SequenceInput], Tensor]]] = {
            "rows": (torch.float32, (rows, longest, dims[name]), lambda sequence: sequence.rows),
            "mask": (torch.bool, (rows, longest), lambda sequence: sequence.mask),
            "lengths": (torch.int64, (rows,), lambda sequence: sequence.mask.sum(1)),
        }
        dtype, shape, read = parts[source.part]
        return _Argument(dtype, shape, _gathered(lambda inputs: read(inputs.sequences[name]), is_gathered))
    if isinstance(source, manifest.PooledInput):
        if unknown := [name for name in source.features if name not in shapes.columns]:
            known = list(shapes.columns)
            raise RankingModelError(f"{prefix}: {unknown[0]!r} is none of the pooled features; they are {known}")
        sides = {spec.feature(name).side for name in source.features}
        if len(sides) != 1:
            raise RankingModelError(f"{prefix}: {list(source.features)} are of both sides; give each side an argument")
        what, is_context = "pooled", sides == {"context"}
    elif isinstance(source, manifest.SideInput):
        what, is_context = f"side {source.side}", source.side == "context"
    else:
        what, is_context = source.source, isinstance(source, manifest.ContextFloats)
    if not (is_context or is_gathered):
        raise RankingModelError(f"{prefix}: {what} of candidates can't come per request")
    side = shapes.context if is_context else shapes.candidate
    if isinstance(source, manifest.PooledInput):
        pieces = [shapes.columns[name] for name in source.features]
    else:
        pieces = [slice(0, side.padded_width) if isinstance(source, manifest.SideInput) else side.dense_columns]
    merged = pieces[:1]
    for piece in pieces[1:]:
        # Neighbours are read as one piece.
        if merged[-1].stop == piece.start:
            merged[-1] = slice(merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    width = sum(piece.stop - piece.start for piece in merged)
    if not width:
        raise RankingModelError(f"{prefix}: the model has no {what}")

    def bind(inputs: RankingInputs) -> Tensor:
        matrix = inputs.context if is_context else inputs.candidates
        return torch.cat([matrix[:, piece] for piece in merged], dim=1) if len(merged) > 1 else matrix[:, merged[0]]

    return _Argument(torch.float32, (rows, width), _gathered(bind, is_context and is_gathered))


def _gathered(read: Binding, is_gathered: bool) -> Binding:
    """Return what reads contiguous rows, as programs expect them, for each candidate if they are `is_gathered`."""
    if is_gathered:
        return lambda inputs: read(inputs).index_select(0, inputs.request_of_candidate)
    return lambda inputs: read(inputs).contiguous()


def _check_by_trial(spec: ModelSpec, model: ExportedRanking) -> None:
    """Compare requests scored together with each alone: outputs must be finite, and depend on no other request."""
    inputs = _trial_inputs(model.shapes, model.dtype)
    together = model.scores(inputs)
    names = ["the score", *(repr(name) for name in _exported(spec).outputs)]
    alone = torch.cat([model.scores(part) for part in inputs.split(TRIAL_CANDIDATES)], dim=1)
    for name, scores, expected in zip(names, together, alone, strict=True):
        if not bool((scores + expected).isfinite().all()):
            raise RankingModelError(f"model {spec.model!r}: output {name} is not finite for inputs drawn at random")
        difference = float(((scores - expected).abs() / scores.abs().clamp(min=1)).max())
        if difference > TRIAL_TOLERANCE[model.dtype]:
            problem = f"output {name} of a candidate changes by {difference:.2g} with the requests it is scored with"
            advice = "a program must treat each candidate by itself (in eval mode, no batch statistics)"
            raise RankingModelError(f"model {spec.model!r}: {problem}; {advice}")


def _trial_inputs(shapes: InputShapes, dtype: torch.dtype) -> RankingInputs:
    draw = torch.Generator().manual_seed(0)
    requests, candidates = len(TRIAL_CANDIDATES), sum(TRIAL_CANDIDATES)
    context, rows = (
        F.pad(torch.randn(count, side.width, generator=draw), (0, side.padded_width - side.width)).to(dtype)
        for side, count in ((shapes.context, requests), (shapes.candidate, candidates))
    )
    mask = torch.arange(4) < torch.tensor([[4], [0], [2]])
    sequences = {
        name: SequenceInput((torch.randn(requests, 4, dim, generator=draw) * mask[:, :, None]).to(dtype), mask)
        for name, dim in shapes.sequence_dims.items()
    }
    owner = torch.repeat_interleave(torch.arange(requests), torch.tensor(TRIAL_CANDIDATES))
    return RankingInputs(context, rows, sequences, owner, is_ordered=True)


def export_program(spec: ModelSpec, module: nn.Module, dtype: torch.dtype = torch.float32) -> ExportedProgram:
    """Export a module whose `forward` takes the inputs of the description, by name, for any number of each.

    Floats are in `dtype`, as in the module. Raises RankingModelError if inputs do not fit the model's features, and
    whatever `torch.export` does.
    """
    # Sizes differ from one another, so that none is taken for another.
    inputs = _trial_inputs(InputShapes.of(spec), dtype)
    arguments: dict[str, Tensor] = {}
    dynamic: dict[str, dict[int, Any]] = {}
    for name, source in _exported(spec).inputs.items():
        argument = _argument(spec, source)
        arguments[name] = argument.bind(inputs)
        dynamic[name] = {dim: torch.export.Dim.AUTO for dim, size in enumerate(argument.shape) if isinstance(size, str)}
    with torch.no_grad():
        return torch.export.export(module.eval(), (), arguments, dynamic_shapes=dynamic, strict=False)

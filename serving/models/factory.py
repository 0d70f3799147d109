"""Building a ranking model from its description, and loading its tensors strictly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from loader.snapshot.manifest import ModelSpec
from serving.errors import RankingModelError
from serving.models.config import parse_dense_model
from serving.models.inputs import InputShapes
from serving.models.ranking_models import CPU, DcnV2, Dlrm, MlpRanking, RankingModel, TargetAttention

DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16"]
_MODELS: dict[str, Callable[[Any, InputShapes], RankingModel]] = {
    "mlp": MlpRanking,
    "dlrm": Dlrm,
    "dcn_v2": DcnV2,
    "target_attention": TargetAttention,
}


def build_model(spec: ModelSpec) -> RankingModel:
    """An untrained model in float32, as its description says. Raises RankingModelError if that is not valid."""
    config = parse_dense_model(spec)
    return _MODELS[config.kind](config, InputShapes.of(spec))


def load_model(spec: ModelSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> RankingModel:
    """A model that is ready to score, with its weights in `dtype`: float32 or bfloat16.

    Raises RankingModelError: naming the tensors that are missing, unknown, not floating point, not finite or of another
    shape.
    """
    # On the meta device nothing is allocated or drawn at random before the tensors are known to fit.
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build_model(spec).state_dict().items()}
    _check_tensors(spec, tensors, expected)
    model = build_model(spec)
    model.load_state_dict(dict(tensors), strict=True)
    model.pad_inputs()
    model = model.to(dtype).requires_grad_(False).eval()
    model.pack()
    return model


def _check_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    prefix = f"model {spec.model!r}: dense model {spec.dense_model.kind!r}"
    if missing := sorted(expected.keys() - tensors.keys()):
        raise RankingModelError(f"{prefix}: missing tensors: {missing}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise RankingModelError(f"{prefix}: unknown tensors: {unknown}; it has: {sorted(expected)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise RankingModelError(
                f"{prefix}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise RankingModelError(f"{prefix}: tensor {name!r} is {tensor.dtype}, expected floating point")
        if not bool(torch.isfinite(tensor).all()):
            raise RankingModelError(f"{prefix}: tensor {name!r} holds NaN or inf")


def bfloat16_is_native(capabilities: Mapping[str, Any] | None = None) -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; emulated, they would be slower than float32.

    `capabilities` are those of the CPU, as `torch.cpu.get_capabilities` tells them; None asks it.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    capabilities = torch.cpu.get_capabilities() if capabilities is None else capabilities
    if capabilities["architecture"] != "x86_64":
        return True
    # On x86 oneDNN counts any AVX-512 as support, which includes emulation.
    return bool(capabilities["avx512_bf16"] or capabilities["amx_bf16"])


def choose_dtype(choice: DtypeChoice, device: torch.device = CPU, *, native: bool | None = None) -> torch.dtype:
    """The number format of the ranking model on a device: `auto` is bfloat16 where that has it.

    `native` says whether it has; None asks it: GPUs of compute capability 8.0 and above do. Raises RankingModelError
    if bfloat16 is asked for and the device has none.
    """
    if choice == "float32":
        return torch.float32
    if native is None:
        is_gpu = device.type == "cuda"
        native = torch.cuda.get_device_capability(device) >= (8, 0) if is_gpu else bfloat16_is_native()
    if choice == "bfloat16" and not native:
        what = "CPU" if device.type == "cpu" else "GPU"
        raise RankingModelError(f"dtype 'bfloat16': this {what} has no bfloat16; use 'auto' or 'float32'")
    return torch.bfloat16 if native else torch.float32

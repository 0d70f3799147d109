"""A dense model's work on a device needs nothing of the host, so that a CUDA graph can record it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from router.feature_schema import FeatureSchema
from serving.cards.layout import BatchClass, CardLayout
from serving.models.ranking_models import build_model
from shardrank_testing.card_ranking import DENSE, SHOP_LEVERS, shop_levers, shop_spec
from shardrank_testing.ranking import converted, random_inputs

COMPOSED = {"kind": "quotient_remainder", "buckets": 20}
DEVICE = torch.device("meta")
"""Stands for a card: it refuses what would have to wait for a value, and work with tensors of another device."""


class OfTheHost(TorchDispatchMode):
    """Notes operations that read a tensor in the host's memory, a copy from there among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(one.device.type == "cpu" for one in tensors):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("dense", [(2, 3), (3, 0)])
@pytest.mark.parametrize("kind", DENSE)
def test_a_models_work_is_of_the_device_alone(kind, dense, number_format):
    spec = shop_spec(kind, dense=dense)
    with torch.inference_mode():
        model = build_model(spec).to(DEVICE)
        model.pack(number_format)
        for num_requests in (1, 4):
            inputs = converted(random_inputs(spec, [32 // num_requests] * num_requests), model.dtype)
            inputs = inputs._replace(is_ordered=False).on(DEVICE)
            with OfTheHost() as mode:
                logits = model(inputs)
            assert mode.found == []
            assert (logits.device, logits.dtype, logits.shape) == (DEVICE, torch.float32, (32,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_work_on_parts_is_of_the_device_alone(dtype):
    spec = shop_levers(shop_spec("target_attention"), SHOP_LEVERS | {"films": {"id_mapping": COMPOSED}}).compiled()
    layout, most = CardLayout(spec, FeatureSchema.of(spec), dtype), BatchClass.of(40, 3, 500)
    with torch.inference_mode():
        model = build_model(spec).to(DEVICE)
        model.pack("float32")
        areas = [torch.zeros(most[one.rows], one.width, dtype=dtype, device=DEVICE) for one in layout.areas]
        with OfTheHost() as mode:
            layout.combine(areas, model.projections_by_part)
    assert mode.found == []
    assert len(layout.sums) > 3

"""One ranking model on every device: the `meta` device stands in for a GPU, which has no numbers but all the shapes."""

from __future__ import annotations

import threading

import torch

from serving.models.ranking_models import CPU, DeviceCopies, load_model
from shardrank_testing.ranking import random_inputs, random_tensors, ranking_spec

OTHER = torch.device("meta")


def test_the_original_is_the_copy_for_the_cpu():
    spec = ranking_spec("dlrm")
    model = load_model(spec, random_tensors(spec))
    assert DeviceCopies(model).on(CPU) is model


def test_each_device_has_one_copy_and_the_original_stays_where_it_is():
    spec = ranking_spec("dlrm")
    model = load_model(spec, random_tensors(spec))
    copies = DeviceCopies(model)
    found = []
    threads = [threading.Thread(target=lambda: found.append(copies.on(OTHER))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    tensors = [*found[0].parameters(), *found[0].buffers()]
    assert {tensor.device for tensor in tensors} == {OTHER}
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {CPU}
    assert not any(parameter.requires_grad for parameter in found[0].parameters())


def test_inputs_go_to_a_device_whole_or_stay_as_they_are():
    inputs = random_inputs(ranking_spec("target_attention"), [2, 3])
    assert inputs.on(CPU) is inputs
    moved = inputs.on(OTHER)
    sequence = moved.sequences["history"]
    for tensor in (moved.columns, moved.request_of_candidate, sequence.rows, sequence.mask):
        assert tensor.device == OTHER
    assert (moved.dense_width, moved.embedding_width) == (inputs.dense_width, inputs.embedding_width)

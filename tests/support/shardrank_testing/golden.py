"""Golden requests with the scores that the float32 torch model gives."""

from __future__ import annotations

import numpy as np

from loader.snapshot.golden import GoldenRequests
from serving.embedded import ModelSource, load_served_model
from serving.rank.ranking import merge
from serving.rank.service import RankingService
from shardrank_testing.parsing import parse_json
from shardrank_testing.serving_api import ApiModel, api_request


def golden_of(model: ApiModel, seeds: range = range(4)) -> GoldenRequests:
    """Valid requests with the scores that the float32 torch model gives."""
    service = RankingService()
    served = load_served_model(ModelSource(snapshot=model.path, dtype="float32"), service)
    requests = [api_request(seed, 3 + seed) for seed in seeds]
    parsed = [parse_json(served.schema, request) for request in requests]
    batch = merge(parsed)
    bag_starts, value_starts = batch.bags.bag_starts(), batch.bags.value_starts()
    values, lengths, weights = {}, {}, {}
    for key, name in enumerate(served.schema.names):
        rows = slice(value_starts[key], value_starts[key + 1])
        lengths[name] = batch.bags.lengths[bag_starts[key] : bag_starts[key + 1]].astype(np.int32)
        values[name] = batch.bags.values[rows]
        if name in served.schema.weighted_names:
            weights[name] = batch.bags.weights[rows]
    served.close()
    # Genre skips unknown ids, which golden requests may not have.
    values["genre"] = values["genre"] % 19
    for request in requests:
        sparse = request["candidates"]["sparse"]
        sparse["genre"] = [[one % 19 for one in bag] for bag in sparse["genre"]]
    return GoldenRequests(
        num_candidates=np.array([one.num_candidates for one in parsed], np.int32),
        values=values,
        lengths=lengths,
        weights=weights,
        context_dense=batch.context_dense,
        candidate_dense=batch.candidate_dense,
        scores=np.concatenate([model.scores(request) for request in requests]),
    )

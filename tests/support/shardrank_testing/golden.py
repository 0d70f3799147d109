"""Golden requests with the scores that the float32 torch model gives."""

from __future__ import annotations

import numpy as np

from loader.snapshot.golden import GoldenRequests
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.parsing import parse_json
from shardrank_testing.serving_api import ApiModel, api_request


def golden_of(model: ApiModel, seeds: range = range(4)) -> GoldenRequests:
    """Valid requests with the scores that the float32 torch model gives."""
    service = RankingService()
    served = load_served_model(ModelSource(snapshot=model.path, dtype="float32"), service)
    requests = [api_request(seed, 3 + seed) for seed in seeds]
    parsed = [parse_json(served.schema, request) for request in requests]
    values, lengths, weights = {}, {}, {}
    for key, name in enumerate(served.schema.names):
        own = [one.bags for one in parsed]
        starts = [bags.bag_starts() for bags in own]
        spans = [slice(int(one[key]), int(one[key + 1])) for one in starts]
        ids = [slice(int(b.offsets[s.start]), int(b.offsets[s.stop])) for b, s in zip(own, spans, strict=True)]
        lengths[name] = np.concatenate([b.lengths[s] for b, s in zip(own, spans, strict=True)]).astype(np.int32)
        values[name] = np.concatenate([b.values[i] for b, i in zip(own, ids, strict=True)])
        if name in served.schema.weighted_names:
            weights[name] = np.concatenate([b.weights[i] for b, i in zip(own, ids, strict=True)])
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
        context_dense=np.stack([one.context_dense for one in parsed]),
        candidate_dense=np.concatenate([one.candidate_dense for one in parsed]),
        scores=np.concatenate([model.scores(request) for request in requests]),
    )

"""Golden requests with the scores that the float32 torch model gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from loader.snapshot.golden import GoldenRequests
from loadtest.workloads.prepare import as_golden
from serving.embedded import ModelSource, load_served_model
from serving.rank.service import RankingService
from shardrank_testing.parsing import parse_json
from shardrank_testing.serving_api import ApiModel, api_request


def golden_of(model: ApiModel, seeds: range = range(4)) -> GoldenRequests:
    """Valid requests with the scores that the float32 torch model gives."""
    service = RankingService()
    served = load_served_model(ModelSource(snapshot=model.path, dtype="float32"), service)
    requests = [api_request(seed, 3 + seed) for seed in seeds]
    parsed = [parse_json(served.schema, request) for request in requests]
    served.close()
    # Genre skips unknown ids, which golden requests may not have.
    for request in requests:
        sparse = request["candidates"]["sparse"]
        sparse["genre"] = [[one % 19 for one in bag] for bag in sparse["genre"]]
    golden = as_golden(served.schema, parsed, np.concatenate([model.scores(request) for request in requests]))
    return replace(golden, values={**golden.values, "genre": golden.values["genre"] % 19})

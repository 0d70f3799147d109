"""Published models as workloads: their tables and bags, cut to a share of the rows."""

from __future__ import annotations

from collections.abc import Mapping

from loader.snapshot.manifest import ModelSpec
from loadtest.workloads.candidates import MLPERF_CANDIDATES, VARIED_CANDIDATES, CandidateCounts
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.ids import IdDistribution, Uniform, Zipf
from loadtest.workloads.synthetic import SyntheticWorkload
from serving.cli.capacity import catalog_model


def catalog_workload(
    model: str,
    scale: float = 1.0,
    *,
    ids: IdDistribution | None = None,
    candidates: CandidateCounts | None = None,
    context_features: int = 0,
    varied: bool = True,
) -> SyntheticWorkload:
    """A model of `serving.cli.capacity`.

    Args:
        model: its name there.
        scale: of the numbers of rows, above 0 and at most 1.
        ids: which rows; None for what the model was published with.
        candidates: how many; None for 50 to 500 with a mean of 200 or, not varied, MLPerf's 100 to 700 with 270.
        context_features: how many features, those with the most ids first, come once a request instead of once a
            candidate: a user's histories. The server's model must have been prepared with the same number.
        varied: whether bags are ragged around the published hotness; not, every bag has exactly that.

    Raises:
        WorkloadError: a scale or number of features out of range.
        ModelNotFoundError: no such model.
    """
    if not 0 < scale <= 1:
        raise WorkloadError(f"workload {model!r}: scale {scale:g} is not above 0 and at most 1")
    found = catalog_model(model, scale=scale)
    ids = ids or (Zipf(found.zipf) if found.zipf else Uniform())
    candidates = candidates or (VARIED_CANDIDATES if varied else MLPERF_CANDIDATES)
    spec = _with_context(found.spec, found.hotness, context_features)
    bags = "ragged bags" if varied else "fixed bags"
    chosen = f"{model}:{scale:.12g}, ids {ids.name}, candidates {candidates.name}, {bags}"
    name = f"{chosen}, context features {context_features}" if context_features else chosen
    return SyntheticWorkload(name, spec, found.hotness, ids, candidates, ragged=varied)


def _with_context(spec: ModelSpec, hotness: Mapping[str, int], count: int) -> ModelSpec:
    if not count:
        return spec
    most = len(spec.features) - 1
    if not 0 <= count <= most:
        raise WorkloadError(
            f"context_features: {count} is not in 0..{most}; {spec.model!r} has {most + 1} features, one must be "
            "a candidate's"
        )
    chosen = sorted(spec.features, key=lambda feature: -hotness[feature.name])[:count]
    names = {feature.name for feature in chosen}
    features = tuple(
        feature.model_copy(update={"side": "context"}) if feature.name in names else feature
        for feature in spec.features
    )
    return spec.model_copy(update={"features": features})

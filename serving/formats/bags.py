"""From a request's numbers in any form to keyed bags, and the checks that all forms share.

A form counts the ids and bags of each feature first. When all counts are within the limits, buffers of little-endian
numbers are joined to arrays of the request. Checks are a fixed number of vector operations; only when one fails is the
position searched for that the error names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loader.snapshot.tables import fingerprint_strings
from serving.errors import count_mismatch, invalid_field, invalid_id, limit_exceeded, malformed
from serving.formats.requests import Buffer
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags

RAGGED = -1
"""The width of a feature that says how many ids each of its bags has."""


class FeatureCounts(msgspec.Struct, eq=False):
    """How many ids and bags each feature of a request has, [S] in flat order.

    Attributes:
        keys: int32 [S], flat indices of the features that the request has; a lookup may have any.
        widths: ids in each bag of a feature; `RAGGED` if it has lengths.
        weighted: positions in `keys` of features with weights.
    """

    keys: Int32Array
    num_ids: Sequence[int] | Int64Array
    num_bags: Sequence[int] | Int64Array
    widths: Sequence[int]
    weighted: Sequence[int] | slice = ()

    def check(self, schema: RequestSchema, num_candidates: int | None, path: Callable[[str], str]) -> None:
        """Refuse too many ids or bags, before any is read.

        And unless it is a lookup, with None for candidates, a feature with other than one bag, or one for each
        candidate. `path` names a feature in errors.
        """
        total, allowed = sum(self.num_ids), schema.limits.max_ids_per_request
        if total > allowed:
            for key, count in zip(self.keys.tolist(), self.num_ids, strict=True):
                if count > allowed:
                    raise limit_exceeded(path(schema.names[key]), "max_ids_per_request", allowed, count, "ids")
            raise limit_exceeded("sparse", "max_ids_per_request", allowed, total, "ids over all features")
        if num_candidates is None:
            allowed, count = schema.limits.max_bags_per_feature, max(self.num_bags, default=0)
            if count > allowed:
                name = schema.names[self.keys[list(self.num_bags).index(count)]]
                raise limit_exceeded(path(name), "max_bags_per_feature", allowed, count, "bags")
            return
        given, expected = self.num_bags, schema.bags_per_key(num_candidates).tolist()
        if given != expected:
            key = next(key for key, count in enumerate(expected) if given[key] != count)
            name, is_context, _ = schema.kinds[key]
            unit = "bags" if is_context else "candidates"
            raise count_mismatch(path(name), f"{given[key]} {unit}, expected {expected[key]}")

    def bags(
        self,
        schema: RequestSchema,
        lengths: Int64Array,
        ids: Int64Array,
        texts: Sequence[str] = (),
        weights: Float32Array | None = None,
        *,
        is_lookup: bool = False,
    ) -> KeyedBags:
        """Make bags of what was counted, if the numbers agree and are within the limits.

        `lengths` are those of all bags of `RAGGED` features, `ids` all integer ids, `texts` all string ids, `weights`
        all of `weighted` features, each in flat order.

        Raises InvalidRequestError: a negative length or id, lengths that do not add up to the ids, too many ids, or a
        weight that is not finite.
        """
        keys, limits, longest = self.keys, schema.limits, 1
        num_ids, num_bags = np.array(self.num_ids, np.int64), np.array(self.num_bags, np.int64)
        values, flat_weights = ids, None
        if texts:
            is_text = np.repeat(schema.is_string[keys], num_ids)
            values = np.empty(is_text.size, np.int64)
            values[is_text] = fingerprint_strings(texts)
            values[~is_text] = ids
        if (total := values.size) > (allowed := limits.max_ids_per_request):
            raise limit_exceeded("sparse", "max_ids_per_request", allowed, total, "ids over all features")
        if weights is not None:
            flat_weights = np.ones(total, np.float32)
            is_weighted = np.zeros(keys.size, np.bool_)
            is_weighted[self.weighted] = True
            flat_weights[np.repeat(is_weighted, num_ids)] = weights
        if self.widths.count(1) == len(self.widths):
            bags = KeyedBags(keys, num_bags, np.arange(total + 1), values, flat_weights)
            described = num_bags
        else:
            flat_lengths = np.repeat(np.array(self.widths, np.int64), num_bags)
            if lengths.size:
                flat_lengths[flat_lengths == RAGGED] = lengths
            # Bounded one by one before they are summed, so that the sum can't wrap around.
            if flat_lengths.size:
                longest = int(np.maximum.reduce(flat_lengths))
                if not 0 <= int(np.minimum.reduce(flat_lengths)) <= longest <= total:
                    bag, ends = int(((flat_lengths < 0) | (flat_lengths > total)).argmax()), np.cumsum(num_bags)
                    segment = int(np.searchsorted(ends, bag, side="right"))
                    path = schema.feature_path(schema.names[int(keys[segment])], is_lookup=is_lookup)
                    path += f".lengths[{bag - int(ends[segment] - num_bags[segment])}]"
                    raise invalid_field(path, f"{flat_lengths[bag]} is not in 0..{total}, the number of ids")
            bags = KeyedBags.from_lengths(keys, num_bags, flat_lengths, values, flat_weights)
            described = bags.values_per_key()
        if not np.array_equal(described, num_ids):
            segment = int((described != num_ids).argmax())
            path = schema.feature_path(schema.names[int(keys[segment])], is_lookup=is_lookup)
            raise count_mismatch(
                f"{path}.lengths", f"they add up to {described[segment]}, but there are {num_ids[segment]} ids"
            )
        if longest > limits.max_ids_per_bag:
            path = value_path(schema, bags, int(bags.offsets[int(bags.lengths.argmax())]), is_lookup=is_lookup)
            path = path.rsplit("[", 1)[0]
            raise limit_exceeded(path, "max_ids_per_bag", limits.max_ids_per_bag, longest, "ids in one bag")
        if total and int(np.minimum.reduce(values)) < 0:
            index = int((values < 0).argmax())
            path = value_path(schema, bags, index, is_lookup=is_lookup)
            raise invalid_id(path, f"{values[index]} is not in 0..{MAX_ID}")
        if flat_weights is not None and not np.logical_and.reduce(np.isfinite(flat_weights)):
            index = int((~np.isfinite(flat_weights)).argmax())
            path = value_path(schema, bags, index, "weights", is_lookup=is_lookup)
            raise invalid_field(path, f"{flat_weights[index]} is not a finite float32")
        return bags


def value_path(
    schema: RequestSchema, bags: KeyedBags, value_index: int, member: str = "sparse", *, is_lookup: bool = False
) -> str:
    """Path of one value, such as `candidates.sparse.film_id[3][0]`; a context feature has one index."""
    bag = int(np.searchsorted(bags.offsets, value_index, side="right")) - 1
    starts = bags.bag_starts()
    segment = int(np.searchsorted(starts, bag, side="right")) - 1
    name = schema.names[int(bags.keys[segment])]
    part: Part = "" if is_lookup else schema.part_of(name)
    bag_index = "" if part == "context" else f"[{bag - int(starts[segment])}]"
    return part_path(part, f"{member}.{name}{bag_index}[{value_index - int(bags.offsets[bag])}]")


def array_of(buffer: Buffer, dtype: str, path: str) -> npt.NDArray[Any]:
    """View a buffer as numbers such as `<f4`. Raises InvalidRequestError for a part of one.

    Joining buffers in a `bytearray` makes them aligned and writable, and keeps nothing of the message.
    """
    width, size = int(dtype[-1]), len(buffer)
    if size % width:
        raise malformed(path, f"{size} bytes, which is not a multiple of {width}")
    return np.frombuffer(buffer, dtype)


def text_of(path: str, position: int, element: Buffer) -> str:
    """Decode a string id. Raises InvalidRequestError if it is not UTF-8."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid_id(f"{path}[{position}]", f"it is not UTF-8: {error.reason}") from None

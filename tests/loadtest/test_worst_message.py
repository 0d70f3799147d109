"""What `python -m loadtest.worst_message` reads, by the codecs themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.drill.hostile.messages import MESSAGES, Served
from loadtest.worst_message import CANDIDATES, PLAIN, STRINGS, Case, catalogue_cases, longest_piece, reading
from serving.formats.infer import InferGrpcCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec


def test_every_message_of_the_catalogue_that_must_be_refused_is():
    found = {case.name: list(reading(case))[-1] for case in catalogue_cases()}
    assert {"grpc-outputs", "json-open-lists", "oip-deflate-empty-blocks"} <= set(found)
    assert [
        name for name, outcome in found.items() if outcome == "ok" and MESSAGES[name].outcome in ("refused", "ended")
    ] == []


@pytest.mark.parametrize(
    ("api", "codec"),
    [
        ("grpc", MessageCodec("rank")),
        ("grpc-packed", MessageCodec("rank")),
        ("json", JsonCodec("rank", "model")),
        ("oip-grpc", InferGrpcCodec()),
    ],
)
@pytest.mark.parametrize("model", [PLAIN, STRINGS])
def test_a_valid_request_is_read_and_one_with_a_negative_id_is_not(api, codec: Codec, model):
    assert list(reading(Case("valid", codec, model.encoded(api, 20, 3, strings=1).body, model))) == ["ok"]
    if model is PLAIN:
        (outcome,) = reading(Case("wrong", codec, model.encoded(api, 20, 3, last_id=-1).body, model))
        assert outcome.startswith("invalid_id")
    (outcome,) = reading(Case("many", codec, model.encoded(api, CANDIDATES + 1, 1, one_id=7).body, model))
    assert outcome != "ok"


def test_a_compressed_message_is_read_in_pieces():
    served = Served(model="model", features=("feature_00000",), dense=13)
    body = MESSAGES["oip-deflate-empty-blocks"].build(served)
    case = Case("empty blocks", JsonCodec("rank", "model"), body, is_compressed=True)
    _, found = longest_piece(lambda: reading(case), 1)
    assert len(found) > 100
    assert set(found[:-1]) == {""}
    assert found[-1].startswith("malformed")


def test_the_longest_piece_is_of_the_run_in_which_it_is_shortest():
    def pieces() -> Iterator[int]:
        yield from range(3)

    longest_s, found = longest_piece(pieces, 4)
    assert found == [0, 1, 2]
    assert 0 <= longest_s < 1

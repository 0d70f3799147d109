"""Single bodies over HTTP: JSON that is long, deep or wrong at its end, infer requests that lie about their parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.drill.hostile.attacker import AttackConfig
from loadtest.drill.hostile.protobuf import bomb, compressed, deflate_bomb

LIMIT = 16 << 20
# What lookups and rank requests may have at most by default: ids, and floats of a lookup's answer.
MAX_IDS = 1 << 20
MAX_FLOATS = 2**18
# Rows are of 64, and a bag's length counts too.
DIM = 65
HEADER_LENGTH = "inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Body:
    """What is posted.

    Attributes:
        path: with `{model}` in place of its name.
        body: of the request.
        headers: beside host and content-length.
    """

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})

    def request(self, config: AttackConfig) -> bytes:
        """The bytes of the request."""
        lines = [f"POST {self.path.format(model=config.model)} HTTP/1.1", "host: drill"]
        lines += [f"content-length: {len(self.body)}", *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + self.body


RANK, LOOKUP, INFER = "/v1/models/{model}:rank", "/v1/models/{model}:lookup", "/v2/models/{model}/infer"
Build = Callable[[AttackConfig], Body]


def fixed(path: str, head: bytes, part: bytes, tail: bytes = b"", size: int = LIMIT) -> Build:
    """A body of `size` bytes at most that repeats a part."""
    count = (size - len(head) - len(tail)) // len(part)
    return lambda config: Body(path, head + part * count + tail)


def full_lookup(config: AttackConfig, wrong: str = "") -> Body:
    """A lookup of as many ids as are allowed in as many bags as are allowed; `wrong` is its last id."""
    bags = MAX_FLOATS // DIM // len(config.features)
    hotness = MAX_IDS // (bags * len(config.features))
    bag = json.dumps(list(range(10_000, 10_000 + hotness)), separators=(",", ":"))
    features = [f'"{name}":[{",".join([bag] * bags)}]' for name in config.features]
    if wrong:
        features[-1] = features[-1][: -len("]]")].rpartition(",")[0] + f",{wrong}]]"
    return Body(LOOKUP, ('{"sparse":{' + ",".join(features) + "}}").encode())


def full_rank(config: AttackConfig, wrong: str = "", candidates: int = 1000) -> Body:
    """A rank request of as many ids as are allowed; `wrong` is the last float of its candidates."""
    hotness = MAX_IDS // (candidates * len(config.features))
    bag = json.dumps(list(range(10_000, 10_000 + hotness)), separators=(",", ":"))
    features = ",".join(f'"{name}":[{",".join([bag] * candidates)}]' for name in config.features)
    row = json.dumps([0.5] * config.dense, separators=(",", ":"))
    last = row[:-1].rpartition(",")[0] + f",{wrong}]" if wrong else row
    dense = ",".join([*[row] * (candidates - 1), last])
    return Body(RANK, f'{{"candidates":{{"sparse":{{{features}}},"dense":[{dense}]}}}}'.encode())


def keys(*, distinct: bool) -> Build:
    """A lookup with a million keys."""

    def build(config: AttackConfig) -> Body:
        if distinct:
            text = ",".join(f'"f{number}":[1]' for number in range(1_000_000))
        else:
            text = ",".join([f'"{config.features[0]}":[1]'] * 600_000)
        return Body(LOOKUP, ('{"sparse":{' + text + "}}").encode())

    return build


def number(text: str) -> Build:
    """A lookup with one id that is written so."""
    return lambda config: Body(LOOKUP, f'{{"sparse":{{"{config.features[0]}":[[{text}]]}}}}'.encode())


def infer(document: Callable[[AttackConfig], str], header_length: str | None = None, tail: bytes = b"") -> Build:
    """An infer request in JSON, with the length of its header if one is given."""
    headers = {"content-type": "application/octet-stream"}
    if header_length is not None:
        headers[HEADER_LENGTH] = header_length
    return lambda config: Body(INFER, document(config).encode() + tail, headers)


def _many_inputs(config: AttackConfig) -> str:
    one = f'{{"name":"{config.features[0]}"}}'
    return '{"inputs":[' + ",".join([one] * 600_000) + "]}"


def _many_empty_inputs(config: AttackConfig) -> str:
    return '{"inputs":[' + ",".join(["{}"] * 5_000_000) + "]}"


def _long_data(config: AttackConfig) -> str:
    data = ",".join(["10000"] * 1_000_000)
    name = config.features[0]
    return f'{{"inputs":[{{"name":"{name}","shape":[1000,1000],"datatype":"INT64","data":[{data},"x"]}}]}}'


def _small(config: AttackConfig) -> str:
    inputs = f'{{"name":"{config.features[0]}","shape":[1,1],"datatype":"INT64","parameters":{{"binary_data_size":8}}}}'
    return f'{{"inputs":[{inputs}]}}'


def encoded(coding: str, body: Callable[[], bytes]) -> Build:
    """An infer request under a content coding."""
    return lambda config: Body(INFER, body(), {"content-type": "application/json", "content-encoding": coding})


# By name: what is sent, the row of the table, and how long the loop may stand.
BODIES: Mapping[str, tuple[Build, str, float]] = {
    "json-lookup-wrong-end": (lambda config: full_lookup(config, '"x"'), "7", 100.0),
    "json-rank-wrong-end": (lambda config: full_rank(config, '"x"'), "7", 100.0),
    "json-open-lists": (fixed(RANK, b"", b"["), "own", 100.0),
    "json-open-objects": (fixed(RANK, b"", b'{"a":'), "own", 100.0),
    "json-empty-lists": (fixed(LOOKUP, b'{"sparse":{"feature-000":[[]', b",[]", b"]}}"), "own", 100.0),
    "json-spaces": (fixed(RANK, b"", b" "), "own", 100.0),
    "json-commas": (fixed(RANK, b"[", b","), "own", 100.0),
    "json-zeros": (fixed(LOOKUP, b'{"sparse":{"feature-000":[0', b",0", b"]}}"), "own", 100.0),
    "json-keys": (keys(distinct=True), "own", 100.0),
    "json-one-key": (keys(distinct=False), "own", 100.0),
    "json-digits": (number("9" * 1_000_000), "own", 100.0),
    "json-fraction": (number("0." + "9" * 1_000_000), "own", 100.0),
    "json-exponent": (number("1e" + "9" * 1_000_000), "own", 100.0),
    "json-escapes": (fixed(RANK, b'{"request_id":"', b"\\u0041", b'"}'), "own", 100.0),
    "json-surrogates": (fixed(RANK, b'{"request_id":"', b"\\ud800", b'"}'), "own", 100.0),
    "json-backslashes": (fixed(RANK, b'{"request_id":"', b"\\\\", b'"'), "own", 100.0),
    "json-not-utf8": (fixed(RANK, b'{"request_id":"', b"\xff", b'"}'), "own", 100.0),
    "oip-json-inputs": (infer(_many_inputs), "own", 100.0),
    "oip-json-empty-inputs": (infer(_many_empty_inputs), "own", 100.0),
    "oip-json-data-wrong-end": (infer(_long_data), "own", 100.0),
    "oip-header-beyond": (infer(_small, "99999999", bytes(8)), "own", 50.0),
    "oip-header-negative": (infer(_small, "-1", bytes(8)), "own", 50.0),
    "oip-header-digits": (infer(_small, "9" * 5000, bytes(8)), "own", 50.0),
    "oip-header-short": (infer(_small, "5", bytes(8)), "own", 50.0),
    "oip-header-all": (infer(_small, str(LIMIT - 1000), bytes(LIMIT - 1000)), "own", 100.0),
    "oip-gzip-bomb": (encoded("gzip", lambda: bomb(900)), "own", 50.0),
    "oip-deflate-bomb": (encoded("deflate", deflate_bomb), "own", 50.0),
    "oip-gzip-inputs": (
        lambda config: Body(INFER, compressed(_many_inputs(config).encode()), {"content-encoding": "gzip"}),
        "own",
        100.0,
    ),
}
# The largest that is allowed: answered, or refused by a limit that a deployment has lowered.
ALLOWED: Mapping[str, Build] = {"json-lookup-full": full_lookup, "json-rank-full": full_rank}

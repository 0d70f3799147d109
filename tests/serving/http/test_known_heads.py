"""Requests whose head was met before: answered as if the parser had read them, which it does not."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.known_heads import MAX_HEAD_BYTES, MAX_HEADS, KnownHead, KnownHeads, is_plain, split_head
from serving.http.server import HttpServer
from serving.limits import RequestLimits
from shardrank_testing.inference_requests import binary_body, tensors_of
from shardrank_testing.serving_api import MODEL, api_request, api_service, run

PATH = f"/v1/models/{MODEL}:rank"
INFER = f"/v2/models/{MODEL}/infer"
BODY = json.dumps(api_request(1)).encode()
LONG = BODY + b" " * 150_000
FORMS = ("content-length: {}\r\nhost: x\r\n", "Host: x\r\nContent-Length: {}\r\naccept: */*\r\n")


def post(body: bytes, headers: str = FORMS[0], path: str = PATH) -> bytes:
    return f"POST {path} HTTP/1.1\r\n{headers.format(len(body))}\r\n".encode() + body


class Connected:
    """A server, and a connection to it."""

    def __init__(self, service) -> None:
        self.server = HttpServer(service, 1.0)

    async def __aenter__(self) -> Connected:
        port = await self.server.start("127.0.0.1", 0)
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await self.server.stop()

    @property
    def known(self) -> dict[bytes, KnownHead]:
        return self.server._protocol.known_heads._known

    async def ask(self, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            # Lets the server read what is here, as a piece of its own.
            await asyncio.sleep(0.001 if len(pieces) > 1 else 0)
        return await self.answer()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))


def connected(api_model, main, limits: RequestLimits | None = None) -> None:
    async def whole() -> None:
        with api_service(api_model, limits) as service:
            async with Connected(service) as connection:
                await main(connection)
            assert service.in_flight == 0

    run(whole())


@given(st.sampled_from(FORMS), st.binary(max_size=300), st.integers(0, 50))
def test_a_head_is_found_again_whatever_its_length_says_and_what_follows(form, body, cut):
    sent = post(body, form)
    split = split_head(memoryview(sent))
    assert sent[split.body_at :] == body
    assert int(split.length) == len(body)
    assert split.key == split_head(memoryview(post(b"123", form))).key
    # All but the empty line and the digits, so nothing else is the same.
    assert len(split.key) + len(split.length) + 4 == split.body_at
    assert split_head(memoryview(sent[: max(0, split.body_at - 1 - cut)])) is None


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc",
        b"\r\nPOST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length: 3 \r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length: " + b"1" * 19 + b"\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nx: a content-length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\ncontent-length: 3\r\n\r\nabc",
    ],
)
def test_other_heads_are_left_to_the_parser(sent):
    assert split_head(memoryview(sent)) is None


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        (b"POST /a HTTP/1.1\r\ncontent-length: 3", [(b"content-length", b"3"), (b"a", b"b")]),
        (b"POST /b HTTP/1.1\r\ncontent-length: 3", [(b"content-length", b"3")]),
        (b"POST /a HTTP/1.0\r\ncontent-length: 3", [(b"content-length", b"3")]),
        (b"POST /a HTTP/1.1\r\ncontent-length: 3", [(b"content-length", b"4")]),
        (b"POST /a HTTP/1.1\r\ncontent-length: 3\nx: y", [(b"content-length", b"3\nx: y")]),
        (b"POST /a HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 3", [(b"content-length", b"3")] * 2),
        (b"POST /a HTTP/1.1\r\ncontent-length: 3\r\nexpect: z", [(b"content-length", b"3"), (b"expect", b"z")]),
        (b"POST /a HTTP/1.1\r\ncontent-length: 3\r\nupgrade: z", [(b"content-length", b"3"), (b"upgrade", b"z")]),
        (
            b"POST /a HTTP/1.1\r\ncontent-length: 3\r\nTransfer-Encoding: chunked",
            [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")],
        ),
    ],
)
def test_a_head_that_the_parser_has_read_otherwise_or_that_is_not_all_is_not_kept(head, headers):
    assert is_plain(b"POST /a HTTP/1.1\r\nContent-Length:  3", b"/a", [(b"content-length", b"3")])
    assert not is_plain(head, b"/a", headers)


def test_heads_are_kept_in_a_bounded_number_and_not_before_they_come_again():
    heads, keys = KnownHeads(), [b"%d" % number for number in range(3 * MAX_HEADS)]
    for key in keys:
        assert not heads.has_come_again(key)
        assert heads.has_come_again(key)
        heads.add(key, KnownHead(None, {}))
        assert not heads.has_come_again(b"other " + key)
    assert [key for key in keys if heads.find(key)] == keys[-MAX_HEADS:]
    assert len(heads._seen_once) <= MAX_HEADS


def test_a_head_that_comes_again_passes_the_parser_and_its_answers_are_the_same(api_model):
    async def main(connection: Connected) -> None:
        first = await connection.ask(post(BODY))
        assert not connection.known
        for body in (BODY, BODY + b" ", LONG, LONG + b"  ", BODY):
            assert (await connection.ask(post(body)))[::2] == first[::2]
            assert len(connection.known) == 1
        for one in connection.server._server.server_state.connections:
            # Whatever is given to the parser fails from now on.
            one.parser = None
        for body in (BODY, LONG, BODY + b"   "):
            assert (await connection.ask(post(body)))[::2] == first[::2]
        status, _, text = await connection.ask(post(b"{" + BODY))
        assert (status, json.loads(text)["error"]["kind"]) == (400, "malformed")
        assert (await connection.ask(post(b"")))[0] == 400

    connected(api_model, main)


def test_known_and_other_heads_in_any_pieces_are_answered_in_turn(api_model):
    rng = random.Random(3)
    requests = [post(BODY), post(LONG), post(BODY, FORMS[1]), post(b"{", FORMS[1]), post(LONG + b" ", FORMS[1])]
    statuses = dict(zip(requests, (200, 200, 200, 400, 200), strict=True))

    async def main(connection: Connected) -> None:
        for longest in (300_000, 70_000, 3_000, 70_000, 400_000):
            chosen = [rng.choice(requests) for _ in range(12)]
            sent, at = b"".join(chosen), 0
            while at < len(sent):
                size = rng.randint(1, longest)
                connection.writer.write(sent[at : at + size])
                await connection.writer.drain()
                at += size
                await asyncio.sleep(0)
            answers = [await connection.answer() for _ in chosen]
            assert [status for status, _, _ in answers] == [statuses[one] for one in chosen]
        for request in requests * 3:
            assert (await connection.ask(request))[0] == statuses[request]
        assert len(connection.known) == 2

    connected(api_model, main)


def test_what_is_behind_the_length_in_a_head_still_counts(api_model):
    async def main(connection: Connected) -> None:
        for number in (1, 1, 1, 2, 2, 2, 1):
            form = FORMS[0] + f"x-request-id: id-{number}\r\n"
            assert (await connection.ask(post(BODY, form)))[1]["x-request-id"] == f"id-{number}"

    connected(api_model, main)


def test_a_known_head_with_too_long_a_body_is_refused_before_it_comes(api_model):
    async def main(connection: Connected) -> None:
        for _ in range(3):
            assert (await connection.ask(post(BODY)))[0] == 200
        status, _, body = await connection.ask(post(b" " * 300_001)[:5000])
        assert (status, json.loads(body)["error"]["kind"]) == (413, "body_too_large")

    connected(api_model, main, RequestLimits(max_body_bytes=300_000))


def test_a_long_body_of_a_known_head_that_stalls_is_answered_408(api_model):
    async def main(connection: Connected) -> None:
        for _ in range(3):
            assert (await connection.ask(post(LONG)))[0] == 200
        status, headers, body = await connection.ask(post(LONG)[:-1])
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["kind"] == "request_timeout"
        assert await connection.reader.read() == b""

    connected(api_model, main, RequestLimits(receive_timeout_s=0.2))


def test_a_connection_that_drains_ends_with_its_next_answer_though_the_head_is_known(api_model):
    async def main(connection: Connected) -> None:
        for _ in range(3):
            assert "connection" not in (await connection.ask(post(BODY)))[1]
        connection.server.begin_drain()
        status, headers, _ = await connection.ask(post(BODY))
        assert (status, headers["connection"]) == (200, "close")
        assert await connection.reader.read() == b""

    connected(api_model, main)


def test_a_long_binary_body_is_ranked_where_it_was_put(api_model):
    request = api_request(1, 3000)
    # Whatever the length of the object before them, numbers are aligned.
    for padding in ("", "a", "ab", "abc"):
        body, headers = binary_body(tensors_of(api_model.spec, request), id="one" + padding)
        form = "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + FORMS[0]

        async def main(connection: Connected, body=body, form=form) -> None:
            assert len(body) > 2**17
            answers = [await connection.ask(post(body, form, INFER)) for _ in range(3)]
            assert {(status, text) for status, _, text in answers} == {(200, answers[0][2])}
            expected = json.loads((await connection.ask(post(json.dumps(request).encode())))[2])
            outputs = {one["name"]: one["data"] for one in json.loads(answers[0][2])["outputs"]}
            assert outputs["scores"] == expected["scores"]
            assert outputs["order"] == expected["order"]

        connected(api_model, main)

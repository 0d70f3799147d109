"""Where requests end, and what is refused because that could be understood in two ways. By bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrank_testing.http_wire import Served, chunked, errors, post, statuses

AMBIGUOUS = {
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n",
    "a list of hosts": b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n",
    "a host with a space": b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
    "a host with a path": b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n",
    "a host with a user": b"GET / HTTP/1.1\r\nhost: a@b\r\n\r\n",
    "a host beyond ASCII": b"GET / HTTP/1.1\r\nhost: \xff\r\n\r\n",
    "two hosts and an upgrade": b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "two hosts in 1.0": b"GET / HTTP/1.0\r\nhost: a\r\nHost: a\r\n\r\n",
    "gzip, chunked": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n" * 1
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\ncontent-length: 1\r\n\r\na",
    "chunked in 1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two framings": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
    "a list of lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\na",
    "a signed length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\na",
    "a hexadecimal length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0x1\r\n\r\na",
    "an empty length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length:\r\n\r\n",
    "a huge length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1" + b"0" * 18 + b"\r\n\r\na",
    "NUL": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
    "a control": b"GET / HTTP/1.1\r\nhost: a\r\nx-request-id: a\x01b\r\n\r\n",
    "a bare CR": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n",
    "a bare LF": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\nb: c\r\n\r\n",
    "lines end with LF": b"GET / HTTP/1.1\nhost: a\n\n\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n",
    "a space before the colon": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length : 1\r\n\r\na",
    "no name": b"GET / HTTP/1.1\r\nhost: a\r\n: b\r\n\r\n",
    "a name with a quote": b'GET / HTTP/1.1\r\nhost: a\r\nx"y: b\r\n\r\n',
    "no colon": b"GET / HTTP/1.1\r\nhost: a\r\nabc\r\n\r\n",
    "a target with a control": b"GET /a\x01b HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target with a space": b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target beyond ASCII": b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    "an authority": b"GET example.com:80 HTTP/1.1\r\nhost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nhost: a\r\n\r\n",
    "an unknown method": b"FETCH / HTTP/1.1\r\nhost: a\r\n\r\n",
    "a method in small letters": b"get / HTTP/1.1\r\nhost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_what_is_ambiguous_never_reaches_the_application(sent, caplog):
    served = Served()
    wire = await served.converse([sent + post()])
    assert statuses(wire.sent) == [400]
    assert wire.is_closed
    assert b"connection: close\r\n" in wire.sent
    assert served.calls == []
    assert errors(served.metrics) == {"malformed": 1.0}
    # One line a second, for all of them together, and not by the gate itself.
    assert [record for record in caplog.records if record.name.startswith("serving")] == []


@pytest.mark.parametrize(
    "headers",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
        ("upgrade: websocket", "connection: keep-alive, Upgrade"),
        ("upgrade: h2c",),
    ],
)
async def test_an_upgrade_is_not_granted_and_the_request_is_answered(headers):
    served = Served()
    wire = await served.converse([post(b"hello", *headers) + post(b"again")])
    assert statuses(wire.sent) == [200, 200]
    assert [call[2] for call in served.calls] == [b"hello", b"again"]


@pytest.mark.parametrize(
    "sent",
    [
        chunked([b"a" * 10] * 20, extension=b";" + b"e" * 300),
        chunked([b"abc"], trailers=b"x: y\r\n" * 1000),
        chunked([b"abc"])[:-2] + b"x: " + b"y" * 5000,
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 5000,
        b"GET /" + b"y" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=["extensions", "trailers", "a trailer", "a header", "a target"],
)
@pytest.mark.parametrize("size", [7, 10_000])
async def test_whatever_is_no_body_counts_to_the_limit_of_headers(sent, size):
    served = Served()
    wire = await served.converse([sent[at : at + size] for at in range(0, len(sent), size)])
    assert statuses(wire.sent) == [431]
    assert wire.is_closed
    assert served.calls == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"5\r\nabc\r\n0\r\n\r\n", b"3\r\nabcde\r\n", b"x\r\n", b"\r\n", b"-1\r\n", b"3 3\r\nabc\r\n"),
        *(b"0\r\nx y\r\n\r\n", b"1" * 17 + b"\r\n", b"3\nabc\n0\n\n", b"3;\0\r\nabc\r\n", b"0\r\n x: y\r\n\r\n"),
        *(b"3 ;q\r\nabc\r\n0\r\n\r\n", b"3\r\nabc\r\n0\r\ncontent-length: 7\r\n\r\n"),
    ],
)
async def test_chunks_that_are_not_as_they_should_be_are_refused(body):
    served = Served()
    wire = await served.converse([b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + body])
    # The first one's length takes what follows for the chunk, whose end is then missing.
    assert statuses(wire.sent) == [400]
    assert served.calls == []
    assert wire.is_closed


REQUESTS = st.one_of(
    st.builds(post, st.binary(max_size=300)),
    st.builds(post, st.binary(max_size=50), st.just("connection: upgrade"), st.just("upgrade: h2c")),
    st.builds(chunked, st.lists(st.binary(max_size=40), max_size=8), st.sampled_from([b"", b";a=b", b";q"])),
    st.builds(chunked, st.lists(st.binary(max_size=40), max_size=8), trailers=st.just(b"x: y\r\nhost: z\r\n")),
    st.just(b"GET /g HTTP/1.1\r\nhost: x\r\n\r\n"),
)


@given(st.lists(REQUESTS, min_size=1, max_size=6), st.lists(st.integers(1, 120)), st.data())
async def test_however_requests_are_cut_the_answers_are_the_same(requests, cuts, data):
    """Those refused by their heads are answered unread, the others as without them."""
    is_refused = [data.draw(st.booleans()) for _ in requests]
    sent = [
        request.replace(b"host: x\r\n", b"host: x\r\nx-refuse: 1\r\n") if refused else request
        for request, refused in zip(requests, is_refused, strict=True)
    ]
    stream = b"".join(sent)
    ends = [*itertools.takewhile(lambda end: end < len(stream), itertools.accumulate(cuts)), len(stream)]
    pieces = [stream[begin:end] for begin, end in itertools.pairwise([0, *ends])]

    plain, served = Served(), Served(refuses=True)
    left_out = b"".join(one for one, refused in zip(requests, is_refused, strict=True) if not refused)
    whole = await plain.converse([left_out])
    wire = await served.converse(pieces)
    assert statuses(wire.sent) == [503 if refused else 200 for refused in is_refused]
    assert wire.sent.count(b"retry-after: 1\r\n") == sum(is_refused)
    assert served.calls == plain.calls
    assert any(is_refused) or wire.sent == whole.sent
    assert (whole.is_closed, wire.is_closed) == (False, False)
    assert not any(served.listener.waiting.values())

"""The HTTP/1.1 client for generations against a server that sends exactly these bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from broadcast.answer import Cause
from proxy import upstream
from proxy.upstream import HEAD_LIMIT_BYTES, Upstream, UpstreamBroken
from tests.proxy.scripted import until

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2)


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Upstream]:
    writers = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    there = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        async with asyncio.timeout(10):
            yield there
    finally:
        there.break_all(Cause.RESET, "the test is over")
        there.close()
        for writer in writers:
            writer.transport.abort()
        server.close()
        await until(lambda: not there.opened)


def once(*pieces: bytes, close: bool = False) -> Serve:
    """Answer each request of a connection with these bytes, each written by itself."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return serve


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([WHOLE], b"body"),
        ([bytes([byte]) for byte in WHOLE], b"body"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE], b"body"),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: a\r\n\r\n" + WHOLE], b"body"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4;x=1\r\nbo", b"dy\r\n0\r\n",
          b"trailer: 1\r\n\r\n"], b"body"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n"], b"b"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 40_000 + b"\r\ncontent-length: 1\r\n\r\nb"], b"b"),
    ],
)  # fmt: skip
async def test_a_whole_reply_is_read_whatever_its_framing(pieces, body):
    async with serving(once(*pieces)) as there:
        for _ in range(2):
            reply = await there.ask(HEAD, b"{}", whole=True)
            assert await reply.whole() == body
            assert reply.complete
            assert b"link" not in [name for name, _ in reply.headers]
        assert len(there.opened) == 1  # the second used the first one's connection


async def test_a_body_that_ends_with_its_connection_is_read_and_has_no_known_length():
    async with serving(once(b"HTTP/1.1 200 OK\r\n\r\nbo", b"dy", close=True)) as there:
        reply = await there.ask(HEAD, b"{}", whole=True)
        assert await reply.whole() == b"body"
        assert not reply.body_length_known


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "connection lost"),
        ([b"HTTP/1.1 200 OK\r\ncontent-le"], "connection lost"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\nhalf"], "connection lost"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n"],
         "connection lost"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not an HTTP/1.1 reply"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], "not an HTTP/1.1 reply"),
        ([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 60_000], "header block over"),
    ],
)  # fmt: skip
async def test_what_is_no_whole_reply_is_broken(pieces, why):
    async with serving(once(*pieces, close=True)) as there:
        with pytest.raises(UpstreamBroken, match=why) as caught:
            await there.ask(HEAD, b"{}", whole=True)
        assert caught.value.cause is Cause.RESET
    assert HEAD_LIMIT_BYTES < 6 * 60_000


async def test_a_connection_the_server_closes_after_its_reply_is_not_used_again():
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nb"
    async with serving(once(closing, close=True)) as there:
        for _ in range(3):
            reply = await there.ask(HEAD, b"{}", whole=True)
            assert await reply.whole() == b"b"


async def test_nothing_listens():
    async with serving(once(WHOLE)) as there:
        pass
    with pytest.raises(UpstreamBroken) as caught:
        await there.ask(HEAD, b"{}", whole=True)
    assert caught.value.cause is Cause.REFUSED


async def test_a_name_that_does_not_resolve_is_unreachable():
    there = Upstream("http://no-such-host.invalid:80")
    with pytest.raises(UpstreamBroken) as caught:
        await there.ask(HEAD, b"{}", whole=True)
    assert caught.value.cause is Cause.UNREACHABLE


async def test_a_reused_connection_closed_under_the_request_is_replaced_once():
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        for number in range(2):
            await request(reader)
            requests += 1
            if number:
                return  # the end of an idle connection, crossing the request
            writer.write(WHOLE)

    async with serving(serve) as there:
        for _ in range(3):
            reply = await there.ask(HEAD, b"{}", whole=True)
            assert await reply.whole() == b"body"
        assert requests == 5  # 1, then twice a lost one and its replacement


async def test_a_fresh_connection_that_breaks_is_not_replaced():
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await request(reader)
        requests += 1

    async with serving(serve) as there:
        with pytest.raises(UpstreamBroken):
            await there.ask(HEAD, b"{}", whole=True)
        assert requests == 1


async def test_a_reused_connection_that_breaks_within_a_reply_is_not_replaced():
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await request(reader)
        writer.write(WHOLE)
        await request(reader)
        requests += 1
        writer.write(WHOLE[:10])

    async with serving(serve) as there:
        await there.ask(HEAD, b"{}", whole=True)
        with pytest.raises(UpstreamBroken):
            await there.ask(HEAD, b"{}", whole=True)
        assert requests == 1


async def test_a_reused_connection_lost_late_is_a_lost_request(monkeypatch):
    """After a second it is no race with an idle timeout: the request may well be running."""
    monkeypatch.setattr(upstream, "RACE_S", 0.0)
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await request(reader)
        writer.write(WHOLE)
        await request(reader)
        requests += 1

    async with serving(serve) as there:
        await there.ask(HEAD, b"{}", whole=True)
        with pytest.raises(UpstreamBroken):
            await there.ask(HEAD, b"{}", whole=True)
        assert requests == 1


async def test_what_we_break_off_ourselves_is_not_sent_again():
    """Else a request to a replica that stands still would be sent to it once more, for ever."""
    arrived = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await request(reader)
        writer.write(WHOLE)
        while True:
            await request(reader)
            arrived += 1

    async with serving(serve) as there, asyncio.TaskGroup() as group:
        await there.ask(HEAD, b"{}", whole=True)
        again = group.create_task(broken(there))
        await until(lambda: arrived)
        there.break_all(Cause.RESET, "the replica is down: stalled")
        assert "stalled" in (await again).detail
        assert arrived == 1


async def broken(there: Upstream) -> UpstreamBroken:
    with pytest.raises(UpstreamBroken) as caught:
        await there.ask(HEAD, b"{}", whole=True)
    return caught.value


async def test_what_is_connecting_while_all_is_broken_off_is_broken_off_too():
    async with serving(once(WHOLE)) as there, asyncio.TaskGroup() as group:
        connecting = group.create_task(broken(there))
        await asyncio.sleep(0)
        there.break_all(Cause.RESET, "the replica is down: stalled")
        assert "given up" in (await connecting).detail
        await until(lambda: not there.opened)


async def test_an_idle_connection_is_used_for_less_than_the_servers_five_seconds(monkeypatch):
    async with serving(once(WHOLE)) as there:
        await there.ask(HEAD, b"{}", whole=True)
        first = set(there.opened)
        monkeypatch.setattr(upstream, "IDLE_S", 0.0)
        await there.ask(HEAD, b"{}", whole=True)
        assert not first & there.opened or all(not c.alive for c in first & there.opened)


@pytest.mark.parametrize("whole", [True, False])
async def test_cancelling_closes_the_connection(whole):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        asked.set()
        assert await reader.read() == b""
        closed.set()

    asked, closed = asyncio.Event(), asyncio.Event()
    async with serving(serve) as there, asyncio.TaskGroup() as group:
        work = group.create_task(there.ask(HEAD, b"{}", whole=whole))
        await asked.wait()
        work.cancel()
        await closed.wait()
        await until(lambda: not there.opened)


async def test_a_reply_past_the_limit_is_handed_on_in_pieces(monkeypatch):
    """It is not held whole, and not read ahead of whoever takes the pieces."""
    monkeypatch.setattr(upstream, "WHOLE_LIMIT_BYTES", 100_000)
    size = 3_000_000
    reply_bytes = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"z" * size
    async with serving(once(reply_bytes)) as there:
        reply = await there.ask(HEAD, b"{}", whole=True)
        assert not reply.complete
        assert await reply.whole() is None
        got = 0
        while piece := await reply.chunk():
            got += len(piece)
        assert got == size
        assert reply.complete


async def test_a_server_that_talks_out_of_turn_loses_its_connection(monkeypatch):
    monkeypatch.setattr(upstream, "IDLE_S", 60.0)  # not for having been idle
    async with serving(once(WHOLE + b"HTTP/1.1 200 OK\r\n")) as there:
        reply = await there.ask(HEAD, b"{}", whole=True)
        assert await reply.whole() == b"body"
        await until(lambda: not there.opened)


async def test_who_waits_to_connect_to_a_host_that_vanished_waits_once(monkeypatch):
    """Its turn comes when the connects before it have timed out; no second timeout is spent."""
    monkeypatch.setattr(upstream, "CONNECTING", 1)
    there = Upstream("http://127.0.0.1:1")
    tried = 0

    class Loop(asyncio.SelectorEventLoop):
        async def create_connection(self, *_, **__):
            nonlocal tried
            tried += 1
            await asyncio.sleep(0)  # the others come
            raise TimeoutError

    def run() -> None:
        async def ask() -> list[object]:
            asked = (there.ask(HEAD, b"{}", whole=True) for _ in range(5))
            return await asyncio.gather(*asked, return_exceptions=True)

        with asyncio.Runner(loop_factory=Loop) as runner:
            ended = runner.run(ask())
        assert [end.cause for end in ended] == [Cause.UNREACHABLE] * 5

    await asyncio.to_thread(run)
    assert tried == 1


async def test_connects_to_one_replica_come_no_faster_than_its_listener_takes_them(monkeypatch):
    """Here each is held in its TLS handshake; more begin only as those end."""
    monkeypatch.setattr(upstream, "CONNECTING", 3)
    accepted: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    there = Upstream(f"https://127.0.0.1:{port}", context=ssl.create_default_context())
    asked = [asyncio.ensure_future(there.ask(HEAD, b"{}", whole=True)) for _ in range(7)]
    try:
        for expected in (3, 6, 7):
            await until(lambda expected=expected: len(accepted) >= expected)
            _, last = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda expected=expected: len(accepted) > expected)
            assert len(accepted) == expected + 1  # a listener takes them in their order
            accepted.pop().transport.abort()
            last.transport.abort()
            for writer in accepted[-3:]:
                writer.transport.abort()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ended} == {UpstreamBroken}
    finally:
        for task in asked:
            task.cancel()
        there.close()
        server.close()
        await until(lambda: not there.opened)


def large(size: int) -> tuple[bytes, bytes]:
    """A body in which no two places look alike, and its head."""
    body = b"".join(b"%07d " % number for number in range(size // 8 + 1))[:size]
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size, body


@pytest.mark.parametrize("cut", [0, 1, 100, 20_000, 40_000])
@pytest.mark.parametrize("size", [16_384, 16_385, 32_768, 32_769, 50_000, 98_304, 9_000_000])
async def test_a_large_body_is_read_whole_wherever_it_is_cut(size, cut):
    """What is still to come is read where it stays, and the connection is used again."""
    head, body = large(size)
    async with serving(once(head + body[:cut], body[cut:])) as there:
        for _ in range(3):
            reply = await there.ask(HEAD, b"{}", whole=True)
            assert await reply.whole() == body
            assert await reply.whole() == body
            assert reply.complete
        assert len(there.opened) == 1


@pytest.mark.parametrize("more", [b"x", WHOLE, b"x" * 100_000])
async def test_what_follows_a_large_body_is_nobodys_reply(more, monkeypatch):
    monkeypatch.setattr(upstream, "IDLE_S", 60.0)
    head, body = large(200_000)
    async with serving(once(head + body + more)) as there:
        for _ in range(2):
            reply = await there.ask(HEAD, b"{}", whole=True)
            assert await reply.whole() == body
            await until(lambda: not there.opened)


async def test_a_large_body_cut_short_is_broken():
    head, body = large(200_000)
    async with serving(once(head + body[:150_000], close=True)) as there:
        with pytest.raises(UpstreamBroken) as caught:
            await there.ask(HEAD, b"{}", whole=True)
        assert not caught.value.early
        await until(lambda: not there.opened)


async def test_a_large_body_given_up_half_way_closes_the_connection():
    head, body = large(200_000)
    stay = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(head + body[:150_000])
        await stay.wait()

    async with serving(serve) as there:
        asked = asyncio.ensure_future(there.ask(HEAD, b"{}", whole=True))
        await until(lambda: any(c._rest is not None for c in there.opened))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not there.opened)
        stay.set()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"8\r\n%07d \r\n"


def in_chunks(count: int) -> tuple[Serve, bytes]:
    """A server that writes each of so many chunks by itself, and the body they are."""
    chunks = [CHUNK % number for number in range(count)]
    body = b"".join(b"%07d " % number for number in range(count))
    return once(CHUNKED, *chunks, b"0\r\n\r\n"), body


async def test_a_body_is_poured_piece_by_piece_to_its_end():
    serve, body = in_chunks(200)
    got: list[bytes] = []

    def take(piece: bytes) -> bool:
        got.append(piece)
        return True

    async with serving(serve) as there:
        for _ in range(2):
            got.clear()
            reply = await there.ask(HEAD, b"{}", whole=False)
            assert await reply.pour(take)
            assert b"".join(got) == body
            assert reply.complete
        assert len(there.opened) == 1


async def test_who_has_no_room_gets_the_next_piece_when_it_asks_again():
    serve, body = in_chunks(50)
    got: list[bytes] = []

    def take(piece: bytes) -> bool:
        got.append(piece)
        return False

    async with serving(serve) as there:
        reply = await there.ask(HEAD, b"{}", whole=False)
        times = 0
        while not await reply.pour(take):
            times += 1
            assert len(got) == times
            await asyncio.sleep(0.001)
            assert len(got) == times  # nothing is given unasked
        assert b"".join(got) == body


async def test_a_body_that_breaks_while_it_is_poured_is_broken():
    got: list[bytes] = []
    async with serving(once(CHUNKED, CHUNK % 1, close=True)) as there:
        reply = await there.ask(HEAD, b"{}", whole=False)
        with pytest.raises(UpstreamBroken):
            await reply.pour(lambda piece: got.append(piece) is None)
        assert got == [b"0000001 "]

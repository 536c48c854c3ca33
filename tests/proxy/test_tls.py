"""Replicas behind TLS, with a certificate authority of one's own."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import socket
import ssl
import threading

import httpx
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.httpd import Arrival, Reply
from proxy.settings import Secrets
from proxy.upstream import Upstream
from routing.ids import ReplicaId
from tests.proxy.scripted import OK, ScriptedReplica, Tap, event

NOW = datetime.datetime.now(datetime.UTC)


def certificate(name, key, issuer_name, issuer_key, *, ca, hosts=()):
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer_name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(hours=1))
        .not_valid_after(NOW + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False
        )
    )
    if hosts:
        names = [x509.IPAddress(ipaddress.ip_address(h)) for h in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return builder.sign(issuer_key, hashes.SHA256())


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """``(ca.pem, server context)``; the server's name is 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    root = certificate("rollmux test CA", root_key, "rollmux test CA", root_key, ca=True)
    leaf = certificate("replica", key, "rollmux test CA", root_key, ca=False, hosts=["127.0.0.1"])
    (folder / "ca.pem").write_bytes(root.public_bytes(pem))
    (folder / "leaf.pem").write_bytes(leaf.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf.pem", folder / "key.pem")
    return folder / "ca.pem", context


def secure(context: ssl.SSLContext, **options) -> ScriptedReplica:
    replica = ScriptedReplica(**options)
    replica.server.context = context
    return replica


async def test_a_private_ca_is_trusted_for_probes_and_generations(start, authority):
    ca, context = authority
    async with secure(context) as replica:
        running = await start(
            [replica.url], ca_file=str(ca), secrets=Secrets(token="over-tls"), pause="lazy"
        )
        for _ in range(2):
            answer = await running.complete("tiny", [1])
            assert answer.content == OK
        seen = [*replica.probes, *replica.generations]
        assert {arrival.header("authorization") for arrival in seen} == {"Bearer over-tls"}


async def test_large_replies_over_tls_come_whole_on_one_connection(start, authority):
    ca, context = authority
    text = b'{"choices": [{"text": "%b", "finish_reason": "stop"}]}'
    whole = text % b"".join(b"%07d " % number for number in range(60_000))

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, whole)

    async with secure(context, script=script) as replica:
        running = await start([replica.url], ca_file=str(ca))
        for _ in range(3):
            answer = await running.complete("tiny", [1])
            assert answer.content == whole
        assert len(running.daemon.replicas.upstream(ReplicaId("r0")).opened) == 1


BODY = b"".join(b"%07d " % number for number in range(20_000))


def serve_and_close(
    listener: socket.socket, context: ssl.SSLContext, answer: bytes, *, stay: bool = False
) -> None:
    """Until the listener is closed: all of the answer at once, and the end right behind it, or with
    ``stay`` when the client has gone."""
    with contextlib.suppress(OSError):
        while True:
            plain, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as conn:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += conn.recv(4096)
                whole = b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + answer
                piece_bytes = 8000 if stay else len(whole)
                for start in range(0, len(whole), piece_bytes):
                    conn.sendall(whole[start : start + piece_bytes])
                if stay:
                    conn.recv(1)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY), id="length"),
        pytest.param(
            b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
            id="chunked",
        ),
        pytest.param(b"\r\n" + BODY, id="end-of-connection"),
    ],
)
def test_a_reply_is_whole_though_its_server_closes_right_behind_it(authority, answer, whole):
    """On uvloop, which drops what of a TLS stream its reader had no room for at the stream's end:
    with a small buffer a quarter of these were cut."""
    ca, context = authority

    async def ask(there: Upstream) -> bytes:
        pieces: list[bytes] = []
        reply = await there.ask(b"POST /x HTTP/1.1\r\nhost: x\r\n\r\n", b"", whole=whole)
        if whole:
            return bytes(await reply.whole() or b"")
        assert await reply.pour(lambda piece: pieces.append(piece) is None)
        return b"".join(pieces)

    async def all_of(port: int) -> list[bytes]:
        there = Upstream(f"https://127.0.0.1:{port}", context=ssl.create_default_context(cafile=ca))
        return [await ask(there) for _ in range(40)]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve_and_close, args=(listener, context, answer))
        serving.start()
        try:
            assert uvloop.run(all_of(listener.getsockname()[1])) == [BODY] * 40
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


def test_a_stream_over_tls_goes_on_behind_a_client_that_reads_slowly(authority):
    """On uvloop, where one read may bring more than is read ahead: reading stops, and has to go on
    when that was taken."""
    ca, context = authority
    line = b"data: " + b"x" * 994
    chunked = b"%x\r\n%b\r\n" % (len(line), line) * 8000 + b"0\r\n\r\n"
    answer = b"transfer-encoding: chunked\r\n\r\n" + chunked

    async def taken(port: int) -> int:
        there = Upstream(f"https://127.0.0.1:{port}", context=ssl.create_default_context(cafile=ca))
        reply = await there.ask(b"POST /x HTTP/1.1\r\nhost: x\r\n\r\n", b"", whole=False)
        got, room = len(await reply.chunk()), 1_000_000

        def take(piece: bytes) -> bool:
            nonlocal got, room
            got += len(piece)
            room -= len(piece)
            return room > 0

        async with asyncio.timeout(20):
            while not await reply.pour(take):
                await asyncio.sleep(0.15)
                room = 1_000_000
        for _ in range(500):  # until the connection is closed, which the loop's end does not await
            if there.opened:
                await asyncio.sleep(0.01)
        return got

    with socket.create_server(("127.0.0.1", 0)) as listener:
        args, stay = (listener, context, answer), {"stay": True}
        serving = threading.Thread(target=serve_and_close, args=args, kwargs=stay)
        serving.start()
        try:
            assert uvloop.run(taken(listener.getsockname()[1])) == 8_000_000
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


async def test_a_stream_over_tls_that_is_cut_breaks_visibly(start, authority):
    ca, context = authority
    tap = Tap()
    async with secure(context, script=tap.script) as replica:
        running = await start([replica.url], ca_file=str(ca))
        tap.put(event("one"))
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            for connection in list(replica.server.connections):
                connection.transport.abort()  # no close_notify
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)


async def test_an_unknown_ca_is_told_in_the_status_and_not_as_a_traceback(start, authority, caplog):
    caplog.set_level(logging.INFO, "rollmux")
    _, context = authority
    async with secure(context) as replica:
        running = await start([replica.url], ready=0, hold_s=0.2)
        await running.until(lambda: running.daemon.replicas.fleet["r0"].error_code)
        (shown,) = (await running.status())["replicas"]
        assert shown["state"] in ("joining", "down")
        assert "certificate verify failed" in shown["last_error"].lower()
        assert replica.url in (await running.client.get("/health")).text
        assert (await running.complete("tiny", [1])).status_code == 503
        assert not replica.generations
        assert "Traceback" not in caplog.text

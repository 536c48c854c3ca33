"""The generation paths: read, place, send, reply, record.

Every request passes these phases in this order and ends in one ``RequestRecord``. A reply is held
until it is whole (or, for a stream, until its first piece is here), so that up to then another
replica can be asked without the client noticing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from time import monotonic

import orjson

from broadcast.answer import Cause
from broadcast.fleet import Replica
from broadcast.suspects import Verdict as Suspicion
from proxy.body import Bodies, Generation, NotJson
from proxy.client import Client, ClientGone
from proxy.errors import (
    BadRequest,
    NoReadyReplica,
    ProxyError,
    SuspectRequest,
    TooManyAtOnce,
    UnknownModel,
    UpstreamLost,
    bug_body,
)
from proxy.judge import Verdict, engine_died, judge, judge_piece, readable
from proxy.record import RequestRecord
from proxy.replicas import Replicas
from proxy.reply_tokens import StreamTokens, of_whole
from proxy.upstream import Reply, UpstreamBroken
from routing.ids import ReplicaId
from routing.router import Decision, RouteRequest

log = logging.getLogger("rollmux")

MAX_TRIES = 2
"""A generation is sent at most twice: the trainer retries too, and retries multiply."""

FREE = Suspicion.FREE  # an enumeration's members are dear to look up before Python 3.12

QUIET_S = 5.0
"""Between two log lines about the same replica and cause; the metric counts every one."""

HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
"""RFC 9110, 7.6.1: meant for one connection, never passed on."""
NOT_FORWARDED = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"authorization", b"x-request-id",
    b"accept-encoding",  # a reply is judged before it is passed on, so it has to be readable
}  # fmt: skip


USUAL_CONNECTION = frozenset((b"keep-alive", b"Keep-Alive", b"close"))


def named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Names, in lower case, that a ``connection`` header makes meant for one connection too.

    RFC 9110, 7.6.1. Nearly every request and reply has the usual words or no such header.
    """
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection" and value not in USUAL_CONNECTION:
            named |= {word.strip().lower() for word in value.split(b",")}
    return named


class Given(Exception):
    """One attempt gave nothing that may be handed on. ``answer`` is what came, if anything did."""

    def __init__(
        self, cause: str, detail: str, answer: Reply | None = None, *, sent: bool = True
    ) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.answer = answer
        self.sent = sent
        """False when the replica never saw the request: that try does not count."""


class Generations:
    """Carries generations. ``on_record`` is called once for each, at its end."""

    def __init__(
        self,
        replicas: Replicas,
        *,
        hold_s: float,
        body_timeout_s: float,
        most: int,
        keep_authorization: bool,
        on_record: Callable[[RequestRecord], None],
        count_tokens: bool = False,
    ) -> None:
        self._replicas = replicas
        self._hold_s = hold_s
        self._body_timeout_s = body_timeout_s
        self._most = most
        """Carried at once: one more would find no descriptor, and cost others theirs."""
        self._carried = 0
        self._bodies = Bodies()
        self._not_forwarded = (
            NOT_FORWARDED - {b"authorization"} if keep_authorization else NOT_FORWARDED
        )
        self._on_record = on_record
        self._count_tokens = count_tokens
        self.held = 0
        """Generations that wait for a replica."""
        # Bounded by replicas times the few words for a cause.
        self._quiet_until_s: dict[tuple[str, str], float] = {}

    async def __call__(self, client: Client) -> None:
        """Carry one generation to its end. Raises nothing but ``CancelledError``, at the daemon's.

        What then is not finished for the client ends with its connection.
        """
        record = RequestRecord(client.route, monotonic())
        try:
            await self._serve(client, record)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not client.gone or task is None:
                raise  # the daemon stops: the connection breaks, which the client can see
            task.uncancel()
        except ProxyError as error:
            record.error = error.code
            record.status = error.status
            log.log(
                self._level("", error.code),
                "a generation was answered %d %s: %.300s",
                error.status,
                error.code,
                error,
            )
            if not client.started:
                client.answer(error)
        except Exception:
            record.error = "bug"
            record.status = record.status or 500
            log.exception("a generation failed inside the daemon")
            if not client.started:
                client.reply(*bug_body())
        finally:
            record.client_gone = client.gone
            record.ended_s = monotonic()
            self._on_record(record)

    async def _serve(self, client: Client, record: RequestRecord) -> None:
        body = await client.body(self._body_timeout_s)
        try:
            generation = self._bodies.read(body)
        except NotJson as exc:
            raise BadRequest(str(exc)) from None
        record.received_s = monotonic()
        record.model = generation.model
        record.weight = generation.weight
        record.body_bytes = len(body)
        if self._carried >= self._most:
            raise TooManyAtOnce(f"{self._most} generations are under way, and no more can be")
        headers = self._headers(client.headers, record)
        self._carried += 1
        try:
            await self._carry(client, record, headers, generation, body)
        finally:
            self._carried -= 1

    async def _carry(
        self,
        client: Client,
        record: RequestRecord,
        headers: bytes,
        generation: Generation,
        body: bytes,
    ) -> None:
        """Ask one replica, and one more if the first gives nothing that may be handed on."""
        replicas = self._replicas
        excluded: frozenset[ReplicaId] = frozenset()
        tries = 0
        while True:
            record.phase = "hold"
            try:
                suspicion = replicas.suspicion(body)
                if suspicion is FREE:
                    placed = await self._place(generation, excluded)
                    await self._send(client, record, headers, placed, generation, body)
                elif suspicion is Suspicion.REFUSED:
                    raise SuspectRequest
                else:
                    async with self._alone(generation, excluded, body) as placed:
                        await self._send(client, record, headers, placed, generation, body)
                return
            except Given as exc:
                given = exc
            excluded |= {ReplicaId(record.replica)}
            tries += given.sent
            record.failovers += ((record.replica, given.cause),)
            log.log(
                self._level(record.replica, given.cause),
                "%s: no answer for a generation of %s (%s: %s)",
                replicas.label(record.replica),
                generation.model or "the base model",
                given.cause,
                given.detail,
            )
            if (tries >= MAX_TRIES or len(record.failovers) > len(replicas.fleet)) or (
                # It may be the request's own fault: worth a second opinion, but no waiting.
                given.cause == Verdict.SERVER_ERROR
                and all(r.id in excluded for r in replicas.candidates(generation.model))
            ):
                await self._give_up(client, record, given)
                return

    def _level(self, replica: str, cause: str) -> int:
        """A replica that dies takes hundreds of rollouts along: one line tells of them. A cause
        that is no replica's comes without one."""
        now_s = monotonic()
        if now_s < self._quiet_until_s.get((replica, cause), 0.0):
            return logging.DEBUG
        self._quiet_until_s[replica, cause] = now_s + QUIET_S
        return logging.WARNING

    async def _place(
        self, generation: Generation, excluded: frozenset[ReplicaId]
    ) -> tuple[Replica, Decision]:
        """Choose a replica, waiting for one that is ready and holds the model.

        A replica that failed this request is asked again only when no other is ready. For one that
        is ready but reserved there is no limit to waiting, as there is none in vLLM's queue.
        """
        replicas = self._replicas
        deadline_s = monotonic() + self._hold_s
        while True:
            if not replicas.known(generation.model):
                raise UnknownModel(generation.model)
            candidates = replicas.candidates(generation.model)
            if candidates:
                if excluded and all(r.id in excluded for r in candidates):
                    excluded = frozenset()
                decision = replicas.choose(
                    RouteRequest(
                        generation.model,
                        generation.prompt,
                        generation.weight,
                        excluded,
                        generation.path,
                    ),
                    candidates,
                )
                if decision is not None:
                    generation.path = decision.path
                    return replicas.fleet[decision.replica], decision
            replicas.ledger.named(generation.model, monotonic())  # who waits for it needs it
            if replicas.reserves_one(generation.model):
                deadline_s = monotonic() + self._hold_s
            elif monotonic() >= deadline_s:
                raise NoReadyReplica(
                    f"no ready replica holds {generation.model or 'the base model'} after "
                    f"{self._hold_s:g} s: {replicas.missing()}",
                    5,
                )
            self.held += 1
            try:
                await replicas.changed(deadline_s - monotonic())
            finally:
                self.held -= 1

    @asynccontextmanager
    async def _alone(
        self, generation: Generation, excluded: frozenset[ReplicaId], body: bytes
    ) -> AsyncIterator[tuple[Replica, Decision]]:
        """A replica with nothing else in flight, and nothing new there as long as the block lasts.

        One body at a time, so that the other replicas go on. Waiting for its turn, and for the
        replica to become idle, has no limit but the client's patience: others would only take the
        place, and a repeat start anew.
        """
        replicas = self._replicas
        async with replicas.one_alone:
            while True:
                if replicas.suspicion(body) is Suspicion.REFUSED:  # a copy of it, in the meantime
                    raise SuspectRequest
                replica, decision = await self._place(generation, excluded)
                with replicas.reserved(replica.id):
                    while replica.inflight and replicas.serves(replica, generation.model):
                        await replicas.changed(self._hold_s)
                    if replicas.serves(replica, generation.model):
                        yield replica, decision
                        return

    async def _send(
        self,
        client: Client,
        record: RequestRecord,
        headers: bytes,
        placed: tuple[Replica, Decision],
        generation: Generation,
        body: bytes,
    ) -> None:
        """One attempt on the replica chosen, counted as in flight until it is over.

        Raises ``Given`` when nothing came that may be handed on.
        """
        replicas = self._replicas
        replica, decision = placed
        epoch = replica.epoch
        record.replica = replica.id
        record.decision = decision.reason
        record.prompt = generation.prompt
        record.path = decision.path
        record.attempts += 1
        record.phase = "upstream"
        if not record.sent_s:
            record.sent_s = monotonic()
        head = self._head(client.target, replica, headers, len(body), record)
        lease = replicas.begin(replica, generation, body)
        try:
            reply = await replicas.upstream(replica.id).ask(head, body, whole=not generation.stream)
            try:
                data = await self._fit(reply, replica, epoch, generation)
                if generation.stream:
                    record.first_piece_s = monotonic()
                await self._pass_on(client, record, reply, data)
                if record.error:  # told in the stream itself, which has ended well
                    replicas.died(replica, record.error, epoch)
                    return
            finally:
                reply.abort()  # nothing, if it is complete
        except UpstreamBroken as exc:
            replicas.broken(replica, epoch, exc, body)
            if not client.started:
                raise Given(exc.cause, exc.detail, sent=not _never_sent(exc.cause)) from None
            # Nothing can be taken back: the connection ends without an end of the body.
            record.error = "stream_broken"
            log.warning(
                "%s broke a stream after %d bytes: %s",
                replicas.label(replica.id),
                record.reply_bytes,
                exc.detail,
            )
            return
        finally:
            replicas.end(lease)
        replicas.finished(body)

    async def _fit(
        self, reply: Reply, replica: Replica, epoch: int, generation: Generation
    ) -> bytes | bytearray | None:
        """Wait for what can be judged, and judge it: the whole body, or a stream's first piece.

        Returns that; None for a body too large to be held. Raises ``Given`` for what may not be
        handed on, and ``UpstreamBroken``.
        """
        replicas = self._replicas
        data: bytes | bytearray | None
        if generation.stream and reply.status == 200:
            data = await reply.chunk()
            verdict = judge_piece(data)
        else:
            data = await reply.whole()
            if data is None:
                verdict = Verdict.PASS
            else:
                text = readable(reply.headers, data)
                verdict = judge(reply.status, text, single=generation.single)
        if verdict is Verdict.ADAPTER_LOST and not replicas.believed(generation.model):
            verdict = Verdict.PASS
        if data is None or verdict is Verdict.PASS:
            replicas.answered(replica)
            return data
        words = readable(reply.headers, data)[:300].decode("utf-8", "replace")
        detail = replicas.redact(f"{reply.status} {words}")
        replicas.judged(replica, epoch, verdict, generation.model, reply.status, detail)
        raise Given(verdict, detail, reply)

    async def _give_up(self, client: Client, record: RequestRecord, given: Given) -> None:
        if given.cause == Verdict.SERVER_ERROR and given.answer is not None:
            await self._pass_on(client, record, given.answer, await given.answer.whole())
        elif given.cause == Verdict.ABORTED:
            raise NoReadyReplica("the generation was cut short by a pause or an abort", 1)
        else:
            raise UpstreamLost(f"{record.replica}: {given.cause}: {given.detail}")

    async def _pass_on(
        self, client: Client, record: RequestRecord, reply: Reply, data: bytes | bytearray | None
    ) -> None:
        """Give the client the reply as it came: whole, or piece by piece."""
        record.phase = "reply"
        record.status = reply.status
        kept_back = HOP_BY_HOP
        if named := named_in_connection(reply.headers):
            kept_back = HOP_BY_HOP | named
        headers = [h for h in reply.headers if h[0] not in kept_back]
        headers.append((b"x-rollmux-replica", record.replica.encode()))
        headers.append((b"x-rollmux-route", record.decision.encode()))
        if record.request_id:
            headers = [h for h in headers if h[0] != b"x-request-id"]
            headers.append((b"x-request-id", record.request_id))
        length_known = reply.body_bytes >= 0 and b"content-length" not in kept_back
        if data is not None and reply.complete and not reply.pending:
            _check_end(reply, data)
            if not length_known:
                headers.append((b"content-length", b"%d" % len(data)))
            record.reply_bytes = len(data)
            if self._count_tokens and reply.status == 200:
                record.count(of_whole(readable(reply.headers, data)))
            client.reply(reply.status, headers, data)
            return
        client.start(reply.status, headers, length_known=length_known)
        last: bytes | bytearray = b""
        counted = StreamTokens() if self._count_tokens and reply.status == 200 else None

        def take(piece: bytes | bytearray) -> bool:
            nonlocal last
            if client.gone:
                return False  # this task learns of it in the loop's next turn
            last = piece
            record.reply_bytes += len(piece)
            if counted is not None:
                counted.feed(piece)
            if engine_died(piece):
                record.error = Verdict.ENGINE_DEAD
            return client.write(piece)

        try:
            if data and not take(data):
                await client.drained()
            while not await reply.pour(take):
                await client.drained()
        finally:
            if counted is not None:
                record.count(counted.result())
        _check_end(reply, last)
        client.finish()

    def _headers(self, came: list[tuple[bytes, bytes]], record: RequestRecord) -> bytes:
        """The client's headers that a replica gets, as lines."""
        kept_back = self._not_forwarded
        if named := named_in_connection(came):
            kept_back = kept_back | named
        lines = []
        for header in came:
            if header[0] not in kept_back:
                lines.append(b"%b: %b\r\n" % header)
            elif header[0] == b"x-request-id":
                record.request_id = header[1]
        return b"".join(lines)

    def _head(
        self,
        target: bytes,
        replica: Replica,
        headers: bytes,
        body_bytes: int,
        record: RequestRecord,
    ) -> bytes:
        """Request line and headers as the replica shall see them."""
        upstream = self._replicas.upstream(replica.id)
        own = b""
        if record.request_id:
            # Each attempt has an id of its own: the first one's may still be known there.
            again = b"-%d" % record.attempts if record.attempts > 1 else b""
            own = b"x-request-id: %b%b\r\n" % (record.request_id, again)
        authorization = self._replicas.authorization(replica.id)
        if authorization:
            own += b"authorization: %b\r\n" % authorization
        return (
            b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n"
            b"accept-encoding: identity\r\n%b%b\r\n"
        ) % (upstream.base_path, target, upstream.host_header, body_bytes, headers, own)


def _never_sent(cause: Cause) -> bool:
    return cause in (Cause.REFUSED, Cause.UNREACHABLE)


def _check_end(reply: Reply, last: bytes | bytearray) -> None:
    """Raise ``UpstreamBroken`` for a body that ended with its connection and seems cut short.

    Such a body has no length; whole are JSON, and a stream that closes with its final event.
    """
    if reply.body_length_known or last.rstrip().endswith((b"data: [DONE]", b'"message_stop"}')):
        return
    try:
        orjson.loads(readable(reply.headers, last))
    except orjson.JSONDecodeError:
        raise UpstreamBroken(Cause.RESET, "body cut short") from None

"""Every call but a generation: broadcasts, joined reads, and what `rollmux run` asks for.

State-changing calls pass one at a time, in the order they came, each in a task of its own: a
trainer that hangs up does not stop one half-way.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from broadcast import joins
from broadcast.answer import Answer, NoAnswer
from broadcast.answers import RESET, ResetOutcome, classify_reset, read_list, words
from broadcast.fleet import Probe, Replica, ReplicaState
from broadcast.joins import Joined
from broadcast.pause import RESUMED, Acknowledge, Broadcast, Pause
from broadcast.publication import PublicationResult
from proxy.calls import Calls
from proxy.errors import (
    BadRequest,
    FleetBusy,
    FleetOutage,
    Forbidden,
    NoReadyReplica,
    UpstreamLost,
)
from proxy.fanout import Answers, Fanout
from proxy.journal import Journal
from proxy.metrics import Metrics
from proxy.probes import look
from proxy.proving import Proving
from proxy.publishing import LoadCall, Publishing, read_load
from proxy.record import EventSink, no_event
from proxy.rejoin import MARKER_PREFIX, Rejoin
from proxy.replicas import Replicas
from proxy.settings import replica_url
from proxy.tasks import Tasks
from proxy.tokens import Bearer
from routing.ids import AdapterName, ReplicaId

log = logging.getLogger("rollmux")

T = TypeVar("T")

WEIGHT_SYNC_TIMEOUT_S = 1800.0
"""TRL 1.16 gives a weight update so long (``weight_sync_timeout``)."""
READ_TIMEOUT_S = 10.0
"""One replica's answer to a read; who is silent for longer is left out of the joined one. A server
busy reading a large adapter answers late (field report O-21: 7 s)."""
POLICY_PREFIX = "trl-policy-"
"""TRL 1.16, async_grpo_trainer.py: names of the adapters it publishes."""
IN_PLACE = frozenset(
    (
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/sleep",
    )
)
"""They change weights under names in use: an acknowledged pause is made real before them."""
CHANGES_WEIGHTS = frozenset(("/update_weights", "/finish_weight_update"))
STILL_PAUSED_S = 300.0
"""A pause with no control call for so long is told, again and again: TRL 1.16 saves an adapter
between a pause and its load, which takes seconds, and does not resume when it dies there."""
LONG = frozenset(("/update_weights", "/finish_weight_update", "/collective_rpc", "/sleep"))


class Control:
    """The control plane of one daemon."""

    BROADCAST = (
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/sleep",
        "/wake_up",
        "/abort_requests",
        "/collective_rpc",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    )
    JOINED = ("/is_paused", "/is_sleeping", "/get_world_size", "/server_info", "/v1/models")

    def __init__(
        self,
        replicas: Replicas,
        calls: Calls,
        fanout: Fanout,
        pause: Pause,
        publishing: Publishing,
        proving: Proving,
        rejoin: Rejoin,
        metrics: Metrics,
        bearer: Bearer,
        tasks: Tasks,
        *,
        hold_s: float,
        outage_s: float,
        control_timeout_s: float,
        admin_key: str | None,
        token_hosts: tuple[str, ...],
        watch: Callable[[Replica], None],
        journal: Journal | None,
    ) -> None:
        self.replicas = replicas
        self._calls = calls
        self._fanout = fanout
        self._pause = pause
        self._publishing = publishing
        self._proving = proving
        self._rejoin = rejoin
        self._metrics = metrics
        self._bearer = bearer
        self._tasks = tasks
        self._hold_s = hold_s
        self._outage_s = outage_s
        self._control_timeout_s = control_timeout_s
        self._admin_key = admin_key.encode() if admin_key else None
        self._token_hosts = token_hosts
        self._watch = watch
        self._journal = journal
        self._order = asyncio.Lock()
        self._loads: dict[tuple[str, str], asyncio.Task[Answer | Joined]] = {}
        self._loading: set[asyncio.Task[Any]] = set()
        self._elided = 0
        self._pause_watch: asyncio.Task[None] | None = None
        self.on_event: EventSink = no_event

    # Adapters

    async def load(self, body: bytes) -> Answer | Joined:
        """Publish an adapter. Two calls for the same name and path are one publication."""
        call = read_load(body)
        key = (call.name, call.path)
        task = self._loads.get(key)
        if task is None:
            work = self._load_alone(call)
            task = self._loads[key] = self._tasks.start(
                work, f"load call {call.name}", awaited=True
            )
            task.add_done_callback(lambda _: self._loads.pop(key, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise FleetOutage(f"the load of {call.name} is given up: the run ends") from None

    async def _load_alone(self, call: LoadCall) -> Answer | Joined:
        async with self._publishing.alone(call.name):
            load = self._start_in_order(self._load(call), f"load {call.name}")
            self._loading.add(load)
            load.add_done_callback(self._loading.discard)
            return await asyncio.shield(load)

    async def _load(self, call: LoadCall) -> Answer | Joined:
        try:
            await self._fanout.enough(f"load of {call.name}")
            if any(call.name in r.base_models for r in self.replicas.fleet):
                # vLLM accepts it, and then serves the adapter to all who ask for the base model.
                raise BadRequest(
                    f"'{call.name}' is the base model's name; an adapter under it would shadow the "
                    "model. Give the adapter another name.",
                    param="lora_name",
                )
            if call.in_place:
                await self._make_pause_real()
            result = await self._publish(call)
        except Exception:  # a bug of ours, too, is a failed load to the trainer
            await self._abandon_pause()
            raise
        if not result.committed:
            # TRL dies of a failed load without a resume: nothing may be left paused.
            await self._abandon_pause()
            return _refusal(result.status, result.code, result.message)
        if call.in_place:
            self._weights_changed(result.loaded_on)
        self._prove(call.name)
        return Answer(200, result.message.encode())

    def _prove(self, name: AdapterName) -> None:
        """In a task of its own: nobody waits for it. Nothing while the replicas stand still."""
        self._tasks.start(self._proving.prove(name), f"prove {name}")

    async def _publish(self, call: LoadCall) -> PublicationResult:
        """Publish; begin again when the fleet was lost under it, as long as an outage may last."""
        deadline_s = self.replicas.now_s() + self._outage_s
        while True:
            result = await self._publishing.publish(call)
            if result.code != "replicas_lost" or self.replicas.now_s() >= deadline_s:
                return result
            await self._fanout.enough(f"load of {call.name}")

    async def unload(self, body: bytes) -> Answer:
        """Retire a name. Not in order behind a long publication of another name."""
        answer = await self._publishing.retire(body)
        await self._save()
        return answer

    # Pause

    async def pause(self, query: bytes) -> Answer | Joined:
        return await self._in_order(self._do_pause(query), "pause")

    async def resume(self) -> Answer | Joined:
        return await self._in_order(self._do_resume(), "resume")

    async def _do_pause(self, query: bytes) -> Answer | Joined:
        await self._fanout.enough("pause")
        decision = self._pause.on_pause(query)
        if isinstance(decision, Acknowledge):
            self._count_elided()
            self.on_event("pause", real=False)
            log.info("pause acknowledged; the replicas go on (new adapters need no pause)")
            return decision.answer
        if self.replicas.fleet.inflight() and b"mode=keep" not in query:
            log.warning(
                "a pause without mode=keep while %d rollouts run: vLLM cuts them short",
                self.replicas.fleet.inflight(),
            )
        joined = await self._really_pause(decision)
        self._count_elided()
        return joined

    async def _really_pause(self, decision: Broadcast) -> Joined:
        """Pause every ready replica, or none."""
        fleet = self.replicas.fleet
        self._expect_paused(None)
        targets = fleet.routable()
        answers = await self._post(targets, decision.target)
        # Who died of it, or under it, is out of rotation; its catch-up will pause it.
        staying = {r.id for r in fleet.routable()}
        paused, failed, unknown = _sorted({id: a for id, a in answers.items() if id in staying})
        now_s = self.replicas.now_s()
        fleet.set_paused(paused, True, now_s)
        undo = self._pause.pause_done(decision, paused, failed, unknown)
        if not undo and not failed and paused:
            self._expect_paused(True)
            for late in fleet.routable():
                if late.id not in answers:  # it became ready meanwhile, and runs
                    moved = fleet.must_rejoin(late.id, "missed_pause", "is not paused yet", now_s)
                    self.replicas.apply(moved)
            clears = b"clear_cache=false" not in decision.target.encode()
            if clears:
                self.replicas.router.forget_all()
            self.on_event("pause", real=True, clear_cache=clears)
            reached = {id: a for id, a in answers.items() if id in paused}
            return joins.joined_success(reached, self._fanout.urls(), "pause")
        log.error("pause failed on %s; it is undone", ", ".join((*failed, *unknown)) or "all")
        left = await self._resume_these(undo)
        self._count_elided()
        error = joins.failure(answers, self._fanout.urls(), "pause")
        if error is None:
            raise NoReadyReplica("no replica is left to pause")
        if left:
            said = orjson.loads(error.body)["error"]["message"]
            words = f"{said}; may still be paused: {', '.join(left)}"
            return _refusal(error.status, error.error, words)
        return error

    def _expect_paused(self, paused: bool | None) -> None:
        """What probes should find. Of a replica asleep, whether it is paused tells nothing."""
        expected = paused if self._pause.asleep is None else None
        self.replicas.fleet.expect_paused(expected, self.replicas.now_s())

    async def _resume_these(self, ids: tuple[ReplicaId, ...]) -> tuple[ReplicaId, ...]:
        """Resume these replicas; those that did not answer must rejoin, and are returned."""
        fleet = self.replicas.fleet
        targets = [r for id in ids if (r := fleet.get(id)) is not None]
        answers = await self._post(targets, "/resume")
        done, failed, unknown = _sorted(answers)
        now_s = self.replicas.now_s()
        fleet.set_paused(done, False, now_s)
        self._expect_paused(False)
        left = (*failed, *unknown)
        for id in left:
            moved = fleet.must_rejoin(id, "left_paused", "did not resume; may be paused", now_s)
            self.replicas.apply(moved)
        return left

    async def _do_resume(self) -> Answer | Joined:
        decision = self._pause.on_resume()
        if isinstance(decision, Acknowledge):
            self._count_elided()
            self.on_event("resume", real=False)
            return decision.answer
        targets = self.replicas.fleet.routable()
        left = await self._resume_these(tuple(r.id for r in targets))
        self._pause.resume_done(left)
        self.on_event("resume", real=True)
        self._count_elided()
        ready = self.replicas.fleet.routable()
        if left and not ready:
            raise UpstreamLost(f"resume failed on {', '.join(left)}: they may still be paused")
        if (latest := self.replicas.ledger.latest) is not None:
            self._prove(latest.name)  # its load came within the pause
        return RESUMED

    async def _make_pause_real(self) -> None:
        """Before weights change in place. Raises what a failed pause raises."""
        decision = self._pause.make_real()
        if decision is not None:
            log.info("weights are about to change in place: the pause is made real")
            joined = await self._really_pause(decision)
            if not joined.ok:
                raise UpstreamLost(f"the pause could not be made real: {joined.body.decode()}")

    async def _abandon_pause(self, *, joining: bool = False) -> None:
        """Nobody will resume: take the pause back, acknowledged or real.

        ``joining``: on replicas that are not ready yet, too.
        """
        was_paused = self._pause.paused
        decision = self._pause.abandon()
        if was_paused:
            self.on_event("resume", real=decision is not None)
        if decision is not None:
            states = {ReplicaState.READY, ReplicaState.JOINING} if joining else {ReplicaState.READY}
            targets = tuple(r.id for r in self.replicas.fleet if r.state in states)
            left = await self._resume_these(targets)
            self._pause.resume_done(left)
        self._count_elided()

    def _count_elided(self) -> None:
        elided = self._pause.elided
        if elided > self._elided:
            self._metrics.pauses_elided.inc(elided - self._elided)
            self._elided = elided

    # Broadcasts

    async def broadcast(self, path: str, target: str, body: bytes) -> Answer | Joined:
        """One call to every ready replica, and one answer."""
        return await self._in_order(self._broadcast(path, target, body), path)

    async def _broadcast(self, path: str, target: str, body: bytes) -> Answer | Joined:
        await self._fanout.enough(path)
        if path in IN_PLACE:
            await self._make_pause_real()
        clears = path == "/reset_prefix_cache"
        seen = self.replicas.ledger.cache_cleared() if clears else 0
        timeout_s = WEIGHT_SYNC_TIMEOUT_S if path in LONG else self._control_timeout_s
        targets = self.replicas.fleet.routable()
        # With a body it may write a version of its own over the run's marker.
        marks = targets if path == "/finish_weight_update" and body else ()
        for replica in marks:
            self.replicas.fleet.marked(replica.id, None, self.replicas.now_s())
        answers = await self._post(targets, target, body or None, timeout_s)
        await asyncio.gather(*(self._mark(replica) for replica in marks))
        # Who did not answer is out of rotation, and brought to the fleet's state when it is back.
        given: Answers = {id: a for id, a in answers.items() if isinstance(a, Answer)} or answers
        joined = self._join(path, given)
        now_s = self.replicas.now_s()
        held = [id for id, a in given.items() if isinstance(a, Answer) and a.ok]
        if joined.ok and path in CHANGES_WEIGHTS:
            self._weights_changed(tuple(held))
        elif joined.ok:
            self.replicas.apply(
                self.replicas.fleet.change_committed([r.id for r in targets if r.id in held], now_s)
            )
        if clears:
            self.replicas.fleet.cache_cleared(held, seen)
            self.replicas.router.forget_all()
        if path == "/sleep" and held:
            self._pause.asleep = target
            self._expect_paused(None)
        elif path == "/wake_up" and self._pause.asleep is not None:
            await self._see_if_awake(targets)
        return joined

    async def _see_if_awake(self, targets: tuple[Replica, ...]) -> None:
        """A call may wake a part of each engine; the last of them also resumes it."""
        answers = await self._fanout.all(
            targets, "GET", "/is_sleeping", timeout_s=self._control_timeout_s
        )
        asleep = joins.is_sleeping(answers, self._fanout.urls())
        if asleep.ok and not orjson.loads(asleep.body)["is_sleeping"]:
            self._pause.asleep = None
            self._pause.resume_done()
            self.replicas.fleet.set_paused(list(answers), False, self.replicas.now_s())
            self._expect_paused(False)

    def _join(self, path: str, answers: Answers) -> Joined:
        urls = self._fanout.urls()
        if path.startswith("/reset_"):
            return joins.reset_cache(answers, urls, path)
        if path == "/abort_requests":
            return joins.abort_requests(answers, urls)
        if path == "/collective_rpc":
            return joins.collective_rpc(answers, urls)
        return joins.joined_success(answers, urls, path)

    def _weights_changed(self, held_by: tuple[ReplicaId, ...]) -> None:
        """Other weights under the same name: no cached block, and nobody who missed it, counts."""
        self.replicas.ledger.weights_changed_in_place()
        self.replicas.router.forget_all()
        self.replicas.apply(
            self.replicas.fleet.weights_changed_in_place(held_by, self.replicas.now_s())
        )

    # Reads

    def health(self) -> Answer:
        """200 as the contract says; else 503 with who is missing. Never asks a replica."""
        if self.replicas.fleet.healthy(self.replicas.now_s()):
            return Answer(200)
        raise NoReadyReplica(f"waiting for replicas: {self.replicas.missing()}", 2)

    async def joined(self, path: str, target: str) -> Answer | Joined:
        """What all ready replicas say, compared."""
        if path == "/is_paused":
            return joins.is_paused(self._pause.paused)
        targets = await self._ready(path)
        timeout_s = min(READ_TIMEOUT_S, self._control_timeout_s)
        answers = await self._fanout.all(targets, "GET", target, timeout_s=timeout_s)
        urls = self._fanout.urls()
        match path:
            case "/is_sleeping":
                return joins.is_sleeping(answers, urls)
            case "/get_world_size":
                return joins.world_size(answers, urls)
            case "/server_info":
                return joins.server_info(answers, urls)
            case _:
                return joins.models(answers, self.replicas.ledger.live, urls)

    async def _ready(self, call: str) -> tuple[Replica, ...]:
        """The ready replicas, waiting up to ``--hold-s`` for one."""
        deadline_s = self.replicas.now_s() + self._hold_s
        while not (ready := self.replicas.fleet.routable()):
            left_s = deadline_s - self.replicas.now_s()
            if left_s <= 0:
                raise NoReadyReplica(f"{call}: no replica is ready: {self.replicas.missing()}")
            await self.replicas.changed(left_s)
        return ready

    async def forward(
        self, method: str, target: str, body: bytes | None, content_type: str
    ) -> Answer:
        """Any ready replica's answer; another is asked when one gives none."""
        last = ""
        for replica in sorted(await self._ready(target), key=lambda r: r.inflight):
            epoch = replica.epoch
            answer = await self._calls(
                replica.id,
                method,
                target,
                body,
                timeout_s=self._control_timeout_s,
                headers={"content-type": content_type} if content_type else None,
            )
            self._fanout.note(replica, answer, epoch)
            if isinstance(answer, Answer):
                return answer
            last = f"{replica.id}: {answer.cause}: {answer.detail}"
        raise UpstreamLost(f"{target}: no replica answered; the last was {last}")

    # What the trainer entry asks for

    async def clean(self, body: bytes) -> Answer | Joined:
        """Bring the fleet to the state of a new run, and mark it as this run's."""
        try:
            data = orjson.loads(body) if body else {}
        except orjson.JSONDecodeError as exc:
            raise BadRequest(f"the body is not JSON: {exc}") from None
        run_id = data.get("run_id") if isinstance(data, dict) else None
        if run_id is not None and not isinstance(run_id, str):
            raise BadRequest("run_id must be text", param="run_id")
        take_over = isinstance(data, dict) and data.get("take_over") is True
        return await self._in_order(self._clean(run_id, take_over), "clean")

    async def _clean(self, run_id: str | None, take_over: bool) -> Answer:
        await self._fanout.enough("clean")
        targets = self.replicas.fleet.routable()
        if not take_over:
            await self._refuse_busy(targets)
        if run_id:
            self._rejoin.run_id = f"{MARKER_PREFIX}{run_id}"
        self._pause.abandon()
        await self._resume_these(tuple(r.id for r in targets))
        self._pause.resume_done()
        self._count_elided()
        names = await asyncio.gather(*(self._clean_one(r) for r in targets))
        ledger = self.replicas.ledger
        for name in (*ledger.live_names(), *ledger.retired_names()):
            if name.startswith(POLICY_PREFIX):
                ledger.retire(name, self.replicas.now_s())
                ledger.forget(name)
                self.replicas.fleet.close(name)
        ledger.first_shapes = None  # of the run that begins now
        self.replicas.router.forget_all()
        # Who was away is not clean, and carries no marker of this run.
        now_s = self.replicas.now_s()
        self.replicas.apply(self.replicas.fleet.change_committed([r.id for r in targets], now_s))
        self.replicas.notify()
        removed = sorted({name for found in names for name in found})
        log.info(
            "the fleet is clean: %d replicas resumed, %s unloaded, prefix caches cleared",
            len(targets),
            ", ".join(removed) or "no adapter",
        )
        return Answer(200, orjson.dumps({"unloaded": removed}), "application/json")

    async def _refuse_busy(self, targets: tuple[Replica, ...]) -> None:
        """Somebody else's rollouts are not ours to end."""
        answers = await self._fanout.all(
            targets, "GET", "/metrics", timeout_s=self._control_timeout_s
        )
        for replica in targets:
            answer = answers[replica.id]
            running = (
                requests_running(answer.body) if isinstance(answer, Answer) and answer.ok else 0
            )
            if running > replica.inflight:
                raise FleetBusy(
                    f"{self.replicas.label(replica.id)} is generating for someone else "
                    f"({running} requests); wait for them to end, or insist with --take-over"
                )

    async def _clean_one(self, replica: Replica) -> list[str]:
        """Unload what a trainer left, clear the cache, mark. Returns the names unloaded."""
        answer = await self._fanout.one(
            replica, "GET", "/v1/models", timeout_s=self._control_timeout_s
        )
        names = [n for n in read_list(answer) or () if n.startswith(POLICY_PREFIX)]
        for name in names:
            self.replicas.fleet.close(AdapterName(name), [replica.id])  # no probe shall miss it
            body = orjson.dumps({"lora_name": name})
            await self._post([replica], "/v1/unload_lora_adapter", body)
        deadline_s = self.replicas.now_s() + self._control_timeout_s
        while self.replicas.now_s() < deadline_s:
            answer = (await self._post([replica], RESET))[replica.id]
            outcome = classify_reset(answer)
            if outcome is not ResetOutcome.HELD:
                break
            await asyncio.sleep(0.25)
        if outcome is not ResetOutcome.CLEARED:
            log.warning(
                "%s: prefix cache not cleared: %s: %s",
                self.replicas.label(replica.id),
                outcome,
                words(answer, 300) if isinstance(answer, Answer) else answer.detail,
            )
        await self._mark(replica)
        return names

    async def _mark(self, replica: Replica) -> None:
        """Leave the run's marker on the process, and believe in it only as read back."""
        self.replicas.fleet.marked(replica.id, None, self.replicas.now_s())
        body = orjson.dumps({"new_version": self._rejoin.run_id})
        await self._post([replica], "/update_weight_version", body)
        seen = await look(self._calls, replica.id, self.replicas.now_s)
        ours = isinstance(seen, Probe) and seen.identity == self._rejoin.run_id
        self.replicas.fleet.marked(
            replica.id, self._rejoin.run_id if ours else None, self.replicas.now_s()
        )

    async def release(self) -> Answer:
        """The trainer is gone: nothing is left paused, by the last daemon of this run neither."""
        await self._rejoin.rebuilt()
        for load in self._loading:  # it may take minutes yet, and who called it is gone
            load.cancel()
        await self._in_order(self._abandon_pause(joining=True), "release")
        return Answer(200, b'{"released":true}', "application/json")

    # Membership

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises ``Forbidden`` unless the admin key came, and not from a web page."""
        if self._admin_key is None:
            raise Forbidden("changing the fleet needs an admin key: start with --admin-key-env")
        if "origin" in headers:
            raise Forbidden("this call came from a web page")
        sent = headers.get("x-rollmux-admin-key") or headers.get("authorization", "")
        if not hmac.compare_digest(sent.removeprefix("Bearer ").encode(), self._admin_key):
            raise Forbidden("this needs the admin key, as x-rollmux-admin-key or a bearer token")

    def add_replica(self, body: bytes) -> Answer:
        try:
            data = orjson.loads(body)
            url = replica_url(data["url"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as exc:
            raise BadRequest('the body must be {"url": "http://…"}') from exc
        except ValueError as exc:
            raise BadRequest(f"url: {exc}", param="url") from None
        host = urlsplit(url).hostname or ""
        if any(
            host == h or (h.startswith("*.") and host.endswith(h[1:])) for h in self._token_hosts
        ):
            self._bearer.trust(url)
        try:
            replica = self.replicas.add(url)
        except ValueError as exc:
            raise BadRequest(str(exc), param="url") from None
        self._watch(replica)
        log.info("%s (%s) is added to the fleet", replica.id, url)
        return Answer(200, orjson.dumps({"id": replica.id, "url": url}), "application/json")

    def remove_replica(self, id: str, *, drain: bool) -> Answer:
        replica = self.replicas.fleet.get(ReplicaId(id))
        if replica is None:
            raise BadRequest(f"no replica {id!r}; /proxy/status lists them", param="id")
        if replica.state is not ReplicaState.DRAINING:
            self.replicas.drain(replica.id)
        if not drain:
            self.replicas.remove(replica.id)
        state = "draining" if drain else "removed"
        return Answer(200, orjson.dumps({"id": id, "state": state}), "application/json")

    # Inside

    async def _in_order(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run after what came before, to its end, whether or not the caller stays."""
        return await asyncio.shield(self._start_in_order(work, name))

    def _start_in_order(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        async def run() -> T:
            try:
                async with self._order:
                    try:
                        return await work
                    finally:
                        self._watch_pause()
                        await self._save()
            finally:
                work.close()  # where it was cancelled before its turn came

        return self._tasks.start(run(), name, awaited=True)

    def _watch_pause(self) -> None:
        """After each call: tell of a pause that nobody ends."""
        if self._pause_watch is not None:
            self._pause_watch.cancel()
        self._pause_watch = None
        if self._pause.paused:
            self._pause_watch = self._tasks.start(self._tell_paused(), "pause watch")

    async def _tell_paused(self) -> None:
        since_s = self.replicas.now_s()
        while True:
            await asyncio.sleep(STILL_PAUSED_S)
            log.warning(
                "the trainer's pause has stood for %.0f s without another call from it; "
                "%s. If the trainer is gone, POST /resume",
                self.replicas.now_s() - since_s,
                "the replicas stand still" if self._pause.real else "the replicas go on",
            )

    async def _save(self) -> None:
        if self._journal is not None:
            await self._journal.save(self._rejoin.run_id)

    def _post(
        self,
        targets: list[Replica] | tuple[Replica, ...],
        target: str,
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Awaitable[Answers]:
        return self._fanout.all(
            targets, "POST", target, body, timeout_s=timeout_s or self._control_timeout_s
        )


def _refusal(status: int, code: str, message: str) -> Joined:
    """The daemon's error, in vLLM's shape, with the status of the replica it is about."""
    error = {"message": message, "type": code, "param": None, "code": status}
    return Joined(status, orjson.dumps({"error": error}), error=code)


def _sorted(
    answers: Answers,
) -> tuple[tuple[ReplicaId, ...], tuple[ReplicaId, ...], tuple[ReplicaId, ...]]:
    """Who did it, who refused, and of whom it is not known. Who never heard of it is in none."""
    done, failed, unknown = [], [], []
    for id, answer in answers.items():
        if isinstance(answer, NoAnswer):
            if not answer.never_received:
                unknown.append(id)
        elif answer.ok:
            done.append(id)
        else:
            failed.append(id)
    return tuple(done), tuple(failed), tuple(unknown)


def requests_running(page: bytes) -> int:
    """Requests running or waiting, from vLLM's ``/metrics``."""
    total = 0.0
    for line in page.split(b"\n"):
        if line.startswith((b"vllm:num_requests_running", b"vllm:num_requests_waiting{")):
            try:
                total += float(line.rsplit(b" ", 1)[1])
            except (IndexError, ValueError):
                continue
    return int(total)

"""Adapters: the trainer's load and unload calls, carried out on the whole fleet or not at all."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

import orjson

from broadcast import adapter_dir, own_copy
from broadcast.answer import Answer
from broadcast.answers import LoadOutcome, UnloadOutcome, classify_unload, read_list
from broadcast.driver import Notice, Timeouts, publish
from broadcast.fleet import ReplicaState, Transition
from broadcast.lag import Lag
from broadcast.ledger import LiveAdapter, Shapes
from broadcast.publication import (
    FleetBack,
    FleetLow,
    Phase,
    PublicationResult,
    ReplicaDown,
    Rules,
    begin,
)
from broadcast.transport import Undelivered
from proxy.bucket_gate import BucketGate
from proxy.calls import Calls
from proxy.errors import AdapterNotVisible, AdapterRefused, BadRequest
from proxy.fanout import Fanout
from proxy.metrics import Metrics
from proxy.once import Once
from proxy.pushing import Pushing
from proxy.rejoin import LoraLimits
from proxy.replicas import Replicas
from proxy.status import Status, Underway
from proxy.tasks import Tasks
from routing.ids import AdapterName, ReplicaId

log = logging.getLogger("rollmux")

SWEEP_S = 1.0
"""How often retired names are looked at."""
UNUSED_LOOK_S = 0.05
"""How often a takeover looks whether the name's last request has ended."""
MAX_USED_NAMES = 4096
"""Names remembered as used before, oldest out first: days of a run with a sync a minute."""
RESULTS = {
    LoadOutcome.LOADED: "loaded",
    LoadOutcome.NOT_VISIBLE: "not_visible",
    LoadOutcome.UNKNOWN: "lost",
    LoadOutcome.NEVER_RECEIVED: "lost",
    LoadOutcome.ENGINE_DEAD: "lost",
    LoadOutcome.NOT_VLLM: "lost",
}
"""Metric words of the outcomes; the rest are ``refused``."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An adapter that was looked at. ``path`` is what replicas read that are not pushed to."""

    path: str
    digest: str = ""
    """Of the files; empty without a copy."""
    copy: str = ""
    """Our own copy of them; empty without one."""
    shapes: Shapes = field(default_factory=dict)
    """Of its tensors; empty where they are not known."""


@dataclass(frozen=True, slots=True)
class LoadCall:
    """A trainer's load call, read and checked."""

    name: AdapterName
    path: str
    in_place: bool
    fields: dict[str, object]
    """The other fields of its body, passed on as they are."""


MAX_NAME_BYTES = 255
"""Bound of what every answer and log line quotes; also what a file system takes for a name."""


def read_load(body: bytes) -> LoadCall:
    """Raises ``BadRequest`` in the words of vLLM 0.27.1 where it has some."""
    data = _object(body)
    name, path = data.get("lora_name"), data.get("lora_path")
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise BadRequest(f"'lora_name' is over {MAX_NAME_BYTES} bytes long", param="lora_name")
    if "\0" in path:
        raise BadRequest("'lora_path' is no path: it has a null byte", param="lora_path")
    # With load_inplace vLLM reads the adapter again at every step (0.27.1, lora/worker_manager.py);
    # unloading the name first, as a takeover does, gives the same weights without that.
    dropped = ("lora_name", "lora_path", "load_inplace")
    fields = {k: v for k, v in data.items() if k not in dropped} | {"load_inplace": False}
    return LoadCall(AdapterName(name), path, data.get("load_inplace") is True, fields)


def _object(body: bytes) -> dict[str, object]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise BadRequest(f"the body is not JSON: {exc}") from None
    if not isinstance(data, dict):
        raise BadRequest("the body is not a JSON object")
    return data


class Publishing:
    """Publishes and retires adapters. Calls that would overlap are put in order by the caller."""

    def __init__(
        self,
        replicas: Replicas,
        calls: Calls,
        fanout: Fanout,
        status: Status,
        metrics: Metrics,
        *,
        rules: Rules,
        timeouts: Timeouts,
        own_copies: bool,
        pushing: Pushing,
        gate: BucketGate | None,
        limits: Callable[[], LoraLimits],
    ) -> None:
        self._replicas = replicas
        self._calls = calls
        self._fanout = fanout
        self._status = status
        self._metrics = metrics
        self._rules = rules
        self._timeouts = timeouts
        self._own_copies = own_copies
        self._pushing = pushing
        self._gate = gate
        self._lag: dict[ReplicaId, Lag] = {}
        self._used: OrderedDict[AdapterName, None] = OrderedDict()
        self._warn = Once(log)
        self._limits = limits
        self._notices: asyncio.Queue[Notice] | None = None
        self._attempted: set[ReplicaId] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        replicas.on_transition.append(self._moved)

    def alone(self, name: str) -> asyncio.Lock:
        """Held by whoever loads, retires or unloads a name: no two of them overlap."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def publish(self, call: LoadCall) -> PublicationResult:
        """One whole publication, with what it does to ledger, fleet and metrics."""
        with self._status.publishing(call.name) as underway:
            return await self._publish(call, underway)

    async def _publish(self, call: LoadCall, underway: Underway) -> PublicationResult:
        replicas, fleet, ledger = self._replicas, self._replicas.fleet, self._replicas.ledger
        known = ledger.get(call.name)
        started_s = replicas.now_s()
        # A name that begins anew may begin another run, with shapes of its own.
        first_shapes = ledger.first_shapes if known is None or call.in_place else None
        found = await self._prepare(call, first_shapes)
        if known is not None and not call.in_place and self._stands_for(known, found.digest):
            return self._again(known, call.path, started_s)
        if known is None:
            return await self._bring(call, found, None, started_s, underway)
        # The name stands for something already: nothing may name it until it is ours.
        log.info("%s is known already; it is taken over", call.name)
        fleet.close(call.name)
        replicas.router.forget_adapter(call.name)
        replicas.notify()
        try:
            underway.phase = "waiting for requests of the name before it"
            await self._until_unused(call.name)
            return await self._bring(call, found, known, started_s, underway)
        except BaseException:
            # What it stood for is on no replica any more; waiting for it would be in vain.
            if ledger.get(call.name) is known:
                ledger.retire(call.name, replicas.now_s())
                ledger.forget(call.name)
                replicas.notify()
            raise

    async def _bring(
        self,
        call: LoadCall,
        found: Prepared,
        known: LiveAdapter | None,
        started_s: float,
        underway: Underway,
    ) -> PublicationResult:
        """The publication itself. ``known`` is what the name stood for before it."""
        replicas, fleet, ledger = self._replicas, self._replicas.fleet, self._replicas.ledger
        underway.phase = "waiting for a slot"
        await self._until_slot(call.name)
        targets = fleet.routable()
        if self._gate is not None and not self._pushing.takes_all([r.id for r in targets]):
            underway.phase = "waiting for the bucket"
            files = await asyncio.to_thread(_file_names, Path(found.path))
            await self._gate.wait(Path(found.path), files)
            targets = fleet.routable()
        self._lag = {id: lag for id, lag in self._lag.items() if id in fleet}
        self._attempted = set()
        # From here on: a replica that goes while the others are listed is not waited for either.
        notices: asyncio.Queue[Notice] = asyncio.Queue()
        self._notices = notices
        underway.phase = "loading"

        def on_attempt(replica: ReplicaId, outcome: LoadOutcome, seconds: float) -> None:
            underway.attempted(replica, outcome)
            if outcome is LoadOutcome.LOADED:
                ledger.loaded(call.name)
            self._on_attempt(replica, outcome, seconds)

        # The files go out while the replicas are asked what they list. Not those of a name that may
        # be listed: until it is unloaded, a replica may have no room for both.
        tasks = Tasks(f"publish {call.name}")
        ahead = {
            r.id: tasks.start(
                self._pushing.deliver(r.id, found.copy, found.path), f"push {r.id}", awaited=True
            )
            for r in targets
            if r.id in self._pushing and known is None and call.name not in self._used
        }

        async def deliver(replica: ReplicaId) -> str | Undelivered:
            if (early := ahead.pop(replica, None)) is not None:
                return await early
            return await self._pushing.deliver(replica, found.copy, found.path)

        try:
            listed = await self._fanout.all(
                targets, "GET", "/v1/models", timeout_s=self._timeouts.control_timeout_s
            )
            before = {
                id: names
                for id, answer in listed.items()
                if (names := read_list(answer)) is not None
            }
            result = await publish(
                begin(
                    call.name,
                    found.path,
                    [r.id for r in targets],
                    self._rules,
                    now_s=replicas.now_s(),
                    listed_before=before,
                    learned_lag_s={
                        id: lag.first_look_s
                        for id, lag in self._lag.items()
                        if id not in self._pushing
                    },
                    used_before=[r.id for r in targets] if call.name in self._used else (),
                ),
                self._calls,
                notices,
                clock=replicas.now_s,
                timeouts=self._timeouts,
                fields=call.fields,
                deliver=deliver,
                on_attempt=on_attempt,
                on_drop=self._on_drop,
            )
        finally:
            self._notices = None
            await tasks.close()
        now_s = replicas.now_s()
        self._remember(call.name)
        if result.committed:
            limits = self._limits()
            for warning in ledger.slot_warnings(limits.max_loras, limits.max_cpu_loras):
                self._warn(warning)
            ledger.commit(
                call.name,
                call.path,
                now_s,
                loaded_from=found.path,
                digest=found.digest,
                copy=found.copy,
            )
            if ledger.first_shapes is None or known is not None:
                ledger.first_shapes = found.shapes or ledger.first_shapes
            for replica, path in result.paths.items():
                fleet.hold((replica,), call.name, path, now_s)
            replicas.apply(fleet.change_committed(result.loaded_on, now_s))
            for replica, seconds in result.visible_s.items():
                self._metrics.visible_seconds.labels(replica).observe(seconds)
                if result.paths.get(replica, found.path) != found.path:
                    continue  # pushed: it says nothing about the mount
                lag = self._lag.get(replica, Lag())
                self._lag[replica] = lag.seen(result.missed_s.get(replica), seconds)
            unused = call.name not in fleet.inflight_names()
            if known is not None and known.copy not in ("", found.copy) and unused:
                await self._remove_copy(known.copy)
        else:
            result = replace(result, message=f"{result.message}{self._addresses(result)}")
            if known is not None:
                ledger.retire(call.name, now_s)
                ledger.forget(call.name)
            if found.copy and not result.stranded:
                await self._remove_copy(found.copy)
        replicas.notify()
        self._status.on_publication(result)
        self._log(result, now_s - started_s)
        return result

    async def _until_slot(self, name: AdapterName) -> None:
        """Wait, bounded, while the load would push a running request's adapter out of an engine
        that could not read it again: the engine dies of that (vLLM 0.27.1, lora/worker_manager.py).
        """
        replicas, ledger = self._replicas, self._replicas.ledger
        limits = self._limits()
        if limits.max_cpu_loras is None:
            return
        deadline_s = replicas.now_s() + self._timeouts.control_timeout_s
        while replicas.now_s() < deadline_s:
            running = replicas.fleet.inflight_names() - {name}
            evicted = [n for n in ledger.next_evicted(limits.max_cpu_loras) if n in running]
            adapters = [a for n in evicted if (a := ledger.get(n)) is not None]
            if not [a for a in adapters if await self._files_gone(a)]:
                return
            self._warn(f"a load waits for requests of {', '.join(evicted)}, whose files are gone")
            await replicas.changed(SWEEP_S)

    async def _until_unused(self, name: AdapterName) -> None:
        """Until no request of a closed name runs: it would leave cached blocks of the old weights.

        Bounded by the control timeout; the clearing of the cache then preempts what still runs.
        """
        replicas = self._replicas
        deadline_s = replicas.now_s() + self._timeouts.control_timeout_s
        while name in replicas.fleet.inflight_names() and replicas.now_s() < deadline_s:
            await replicas.changed(UNUSED_LOOK_S)

    def _stands_for(self, known: LiveAdapter, digest: str) -> bool:
        """Whether every routable replica holds these very bytes under the name already."""
        fleet = self._replicas.fleet
        same = digest != "" and known.digest == digest
        return same and 0 < len(fleet.routable()) == len(fleet.candidates(known.name))

    def _again(self, known: LiveAdapter, path: str, started_s: float) -> PublicationResult:
        """The same bytes under the same name: nothing to load. One that was retired is live."""
        name, ledger = known.name, self._replicas.ledger
        log.info("%s is published already, with the same bytes", name)
        if name in ledger.retired_names():
            ledger.commit(
                name,
                path,
                self._replicas.now_s(),
                loaded_from=known.loaded_from,
                digest=known.digest,
                copy=known.copy,
            )
        holders = tuple(r.id for r in self._replicas.fleet.candidates(name))
        return PublicationResult(
            name=name,
            outcome=Phase.COMMITTED,
            seconds=self._replicas.now_s() - started_s,
            attempts=dict.fromkeys(holders, 0),
            visible_s={},
            missed_s={},
            status=200,
            code="",
            message=f"Success: LoRA adapter '{name}' added successfully.",
            culprit=None,
            loaded_on=holders,
            dropped={},
            stranded=(),
        )

    async def _prepare(self, call: LoadCall, first_shapes: Shapes | None) -> Prepared:
        """Check the files where they can be read from here, and copy them.

        Files cut short are waited for: seen through a mount they may only be not whole yet.
        """
        replicas = self._replicas
        source = Path(call.path)
        deadline_s = replicas.now_s() + self._rules.load_timeout_s
        while True:
            try:
                found = await asyncio.to_thread(
                    adapter_dir.check,
                    source,
                    max_lora_rank=self._limits().max_lora_rank,
                    first_shapes=first_shapes,
                )
                break
            except adapter_dir.AdapterNotReadable as exc:
                log.debug("%s is not checked: %s", call.name, exc)
                return Prepared(call.path)
            except adapter_dir.AdapterIncomplete as exc:
                if replicas.now_s() >= deadline_s:
                    raise AdapterNotVisible(
                        f"LoRA adapter '{call.name}' was not published: its files are still not "
                        f"whole after {self._rules.load_timeout_s:g} s: {exc}"
                    ) from None
                await asyncio.sleep(self._rules.load_retry_s)
            except adapter_dir.AdapterRefused as exc:
                raise AdapterRefused(
                    f"LoRA adapter '{call.name}' was not published: {exc}", status=400
                ) from None
        for warning in found.warnings:
            log.warning("%s: %s", call.name, warning)
        return replace(await self._copied(call.name, source), shapes=found.shapes)

    async def _copied(self, name: AdapterName, source: Path) -> Prepared:
        """A copy beside the source, for replicas that read the mount; where there are none, or it
        cannot be made, a local one for those that are pushed to."""
        pushing = self._pushing
        replicas = [r.id for r in self._replicas.fleet]
        if self._own_copies and not (pushing.required or pushing.takes_all(replicas)):
            copy = await asyncio.to_thread(own_copy.make, source, name)
            if isinstance(copy, own_copy.OwnCopy):
                return Prepared(str(copy.path), copy.digest, str(copy.path))
            self._warn(f"adapters are loaded from the trainer's own path: {copy.reason}")
        if not (pushing.required or any(r in pushing for r in replicas)):
            return Prepared(str(source))
        copy = await asyncio.to_thread(self._cached, source, name)
        if isinstance(copy, own_copy.OwnCopy):
            return Prepared(str(source), copy.digest, str(copy.path))
        self._warn(f"adapters are not pushed: {copy.reason}")
        return Prepared(str(source))

    def _cached(self, source: Path, name: AdapterName) -> own_copy.OwnCopy | own_copy.NoCopy:
        """A copy in the push cache, within its bound. Blocking."""
        cache, ledger = self._pushing.cache, self._replicas.ledger
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = cache.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                return own_copy.NoCopy(f"{cache} is not a folder of ours; give --push-cache")
        except OSError as exc:
            return own_copy.NoCopy(f"{cache} cannot be made: {exc.strerror or exc}")
        wanted = {Path(a.copy) for n in ledger.known_names() if (a := ledger.get(n)) and a.copy}
        for left in own_copy.leftovers(cache, wanted):
            own_copy.remove(left)
        room = self._pushing.max_bytes - own_copy.size(cache)
        return own_copy.make(source, name, inside=cache, max_bytes=room, lasting=False)

    async def _remove_copy(self, copy: str) -> None:
        try:
            await asyncio.to_thread(own_copy.remove, Path(copy))
        except OSError as exc:
            self._warn(f"a copy is left in {Path(copy).parent}: {exc.strerror or exc}")
        await self._pushing.drop([r.id for r in self._replicas.fleet], Path(copy))

    async def _files_gone(self, adapter: LiveAdapter) -> bool:
        """Whether a replica that would have to read the adapter again could not.

        What was pushed to a replica stays there until it is told that nobody needs it.
        """
        held = {r.adapters.get(adapter.name) for r in self._replicas.fleet} - {None}
        if held and adapter.loaded_from not in held:
            return False
        kept = adapter.loaded_from if held else adapter.copy or adapter.loaded_from
        return not await asyncio.to_thread(_readable, kept)

    async def retire(self, body: bytes) -> Answer:
        """The trainer's unload: answered at once, but for a load of that name under way.

        The replicas are told when nobody needs the name any more.
        """
        name = _object(body).get("lora_name")
        if not isinstance(name, str) or not name:
            raise BadRequest("'lora_name' must be provided.", param="lora_name")
        async with self.alone(name):
            retired = self._replicas.ledger.retire(name, self._replicas.now_s())
        if not retired:
            # vLLM 0.27.1, entrypoints/openai/models/serving.py
            error = {
                "message": f"The lora adapter '{name}' cannot be found.",
                "type": "NotFoundError",
                "param": None,
                "code": 404,
            }
            return Answer(404, orjson.dumps({"error": error}), "application/json")
        log.info("%s is retired: served until nobody names it, then unloaded", name)
        return Answer(200, f"Success: LoRA adapter '{name}' removed successfully.".encode())

    async def sweep(self) -> None:
        """Unload retired names that nobody needs any more, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep_once()
            except Exception as exc:  # outermost guard: names would be kept for ever
                log.error("looking at retired names failed: %s: %s", type(exc).__name__, exc)
                log.debug("its traceback", exc_info=exc)

    async def sweep_once(self) -> None:
        replicas, ledger = self._replicas, self._replicas.ledger
        gone = set()
        for name in ledger.retired_names():
            adapter = ledger.get(name)
            if adapter is not None and await self._files_gone(adapter):
                gone.add(name)
        replicas.files_gone = frozenset(gone)

        def due() -> tuple[AdapterName, ...]:
            return ledger.retirable(replicas.now_s(), replicas.fleet.inflight_names(), gone)

        for name in due():
            lock = self.alone(name)
            # Telling the replicas of one takes a while: the next may be in use again, or loaded.
            if not lock.locked() and name in due():
                async with lock:
                    await self.forget(name)

    async def forget(self, name: AdapterName) -> None:
        """Close a retired name everywhere, tell the replicas, and remove our copy of its files.

        To be called with the name's lock: a late unload would take away what a load has brought.
        """
        replicas = self._replicas
        if name not in replicas.ledger.retired_names():
            return
        adapter = replicas.ledger.get(name)
        replicas.fleet.close(name)
        replicas.ledger.forget(name)
        replicas.router.forget_adapter(name)
        self._status.on_event("unload", model=name)
        replicas.notify()
        body = orjson.dumps({"lora_name": name})
        told = await self._fanout.all(
            replicas.fleet.routable(),
            "POST",
            "/v1/unload_lora_adapter",
            body,
            timeout_s=self._timeouts.control_timeout_s,
        )
        gone = [id for id, answer in told.items() if classify_unload(answer) is UnloadOutcome.GONE]
        # Who was not told still lists it, and sweeps it when it rejoins.
        replicas.apply(replicas.fleet.change_committed(gone, replicas.now_s()))
        if adapter is not None and adapter.copy:
            await self._remove_copy(adapter.copy)
        log.info("%s is unloaded everywhere", name)

    def _moved(self, moved: Transition) -> None:
        """Tell a publication that is under way what happens to its replicas."""
        if self._notices is None:
            return
        fleet, now_s = self._replicas.fleet, self._replicas.now_s()
        if moved.new is ReplicaState.DOWN or moved.new is ReplicaState.JOINING:
            self._notices.put_nowait(ReplicaDown(moved.replica, moved.why or moved.code, now_s))
        self._notices.put_nowait(FleetBack(now_s) if fleet.enough() else FleetLow(now_s))

    def _on_attempt(self, replica: ReplicaId, outcome: LoadOutcome, seconds: float) -> None:
        self._metrics.load_attempts.labels(replica, RESULTS.get(outcome, "refused")).inc()
        if replica in self._attempted:
            self._metrics.load_retries.labels(replica).inc()
        self._attempted.add(replica)

    def _on_drop(self, replica: ReplicaId, reason: str) -> None:
        replicas = self._replicas
        replicas.apply(
            replicas.fleet.must_rejoin(replica, "not_published", reason, replicas.now_s())
        )

    def _remember(self, name: AdapterName) -> None:
        self._used[name] = None
        self._used.move_to_end(name)
        while len(self._used) > MAX_USED_NAMES:
            self._used.popitem(last=False)

    def _addresses(self, result: PublicationResult) -> str:
        """URLs of the replicas that an error names by their ids, for whoever has to go there."""
        named = dict.fromkeys((result.culprit, *result.dropped))
        found = [r for r in self._replicas.fleet if r.id in named]
        return f" ({', '.join(f'{r.id} is {r.url}' for r in found)})" if found else ""

    def _log(self, result: PublicationResult, seconds: float) -> None:
        each = ", ".join(
            f"{replica} {attempts} attempt{'s' if attempts != 1 else ''}"
            f"{f' {result.visible_s[replica]:.2f} s' if replica in result.visible_s else ''}"
            for replica, attempts in result.attempts.items()
        )
        for replica, reason in result.dropped.items():
            log.warning(
                "%s is not on %s, which is left out, after %d attempts in %.2f s: %s",
                result.name,
                self._replicas.label(replica),
                result.attempts.get(replica, 0),
                seconds,
                reason,
            )
        if result.committed:
            log.info("%s published in %.2f s (%s)", result.name, seconds, each)
        else:
            log.error(
                "%s not published after %.2f s, %s (%s): %s",
                result.name,
                seconds,
                result.outcome.value,
                each,
                result.message,
            )


def _readable(path: str) -> bool:
    """Whether an adapter's files are there. What cannot be seen from here is not known to be gone:
    only a folder that exists without its configuration, or whose parent exists without it, is."""
    folder = Path(path)
    if (folder / "adapter_config.json").exists():
        return True
    return not folder.parent.exists()


def _file_names(folder: Path) -> list[str]:
    """Files of an adapter; the two that every adapter has, where it cannot be read from here."""
    try:
        found = [file.name for file in adapter_dir.files(folder)]
    except OSError:
        found = []
    return found or [adapter_dir.CONFIG, adapter_dir.WEIGHTS]

"""Brings a replica that is new, or came back, to the fleet's state before it gets a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from broadcast import catchup, own_copy
from broadcast.adapter_dir import CONFIG
from broadcast.answer import Answer, NoAnswer
from broadcast.answers import (
    RESET,
    LoadOutcome,
    ResetOutcome,
    UnloadOutcome,
    classify_load,
    classify_reset,
    classify_unload,
    words,
)
from broadcast.catchup import CatchUp, StepResult
from broadcast.fleet import Probe, Replica, ReplicaState
from broadcast.joins import Facts, facts
from broadcast.ledger import LiveAdapter, version_of
from broadcast.pause import Pause
from broadcast.transport import Undelivered
from proxy.calls import Calls
from proxy.journal import Journal
from proxy.probes import Failed, look
from proxy.pushing import Pushing
from proxy.replicas import Replicas
from routing.ids import AdapterName, ReplicaId

log = logging.getLogger("rollmux")

REBUILD_S = 10.0
"""After the first replica was seen, the others have so long to be seen too before the ledger is
taken as rebuilt. Replicas that survived the daemon answer in milliseconds."""
LOOK_S = 0.05
"""How often a release looks whether the replicas have been seen."""
MARKER_PREFIX = "rollmux-"
MAX_SPARE = 8
"""Retired names, the newest, that a replica which joins is given again. A trainer's requests name
those of the last few syncs."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """What every replica of the fleet can take; None where nobody told."""

    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None


class Rejoin:
    """Catches replicas up, one task each, and rebuilds the ledger when the daemon starts.

    ``run_id`` is the marker (``/update_weight_version``) by which a process is known again.
    """

    def __init__(
        self,
        replicas: Replicas,
        calls: Calls,
        pause: Pause,
        pushing: Pushing,
        *,
        run_id: str,
        journal: Journal | None,
        load_timeout_s: float,
        load_retry_s: float,
        load_retry_max_s: float,
        attempt_timeout_s: float,
        control_timeout_s: float,
    ) -> None:
        self._run_ids = {run_id}
        self._run_id = run_id
        self._replicas = replicas
        self._calls = calls
        self._journal = journal
        self._pause = pause
        self._pushing = pushing
        self._load_timeout_s = load_timeout_s
        self._load_retry_s = load_retry_s
        self._load_retry_max_s = load_retry_max_s
        self._attempt_timeout_s = attempt_timeout_s
        self._control_timeout_s = control_timeout_s
        self.facts: dict[ReplicaId, Facts] = {}
        """What each replica told of its settings, when it joined."""
        self._asked: set[ReplicaId] = set()
        self._models: dict[ReplicaId, tuple[str, ...]] = {}
        self._seen: dict[ReplicaId, Probe | None] = {}
        self._adopting = False
        self._rebuilt = asyncio.Event()
        self._rebuild_deadline_s: float | None = None

    @property
    def run_id(self) -> str:
        return self._run_id

    @run_id.setter
    def run_id(self, run_id: str) -> None:
        """What carries an earlier one, because it was away meanwhile, is ours still."""
        self._run_ids.add(run_id)
        self._run_id = run_id

    async def catch_up(self, replica: Replica) -> None:
        """One attempt; afterwards the replica is ready, or joining or down with the reason."""
        fleet = self._replicas.fleet
        epoch = fleet.catch_up_started(replica.id)
        try:
            await self._catch_up(replica, epoch)
        except Exception:
            # A bug of ours must not leave it half joined for ever: the next attempt starts anew.
            fleet.catch_up_failed(replica.id, epoch, "bug", "see the log", self._replicas.now_s())
            raise

    async def _catch_up(self, replica: Replica, epoch: int) -> None:
        fleet = self._replicas.fleet
        plan = CatchUp(
            self._replicas.ledger,
            self._replicas.now_s(),
            cache_clears=replica.cache_clears,
            deadline_s=self._load_timeout_s,
            retry_s=self._load_retry_s,
            retry_max_s=self._load_retry_max_s,
            spare=await self._retired_with_files(),
        )
        marker: str | None = None
        first: Probe | None = None
        while replica.id in fleet and replica.epoch == epoch:
            now_s = self._replicas.now_s()
            step = plan.next(now_s)
            match step:
                case catchup.Joined():
                    moved = fleet.joined(
                        replica.id,
                        epoch,
                        step.adapters,
                        now_s,
                        identity=marker,
                        cache_clears=plan.cache_clears,
                    )
                    self._replicas.apply(moved)
                    return
                case catchup.GiveUp():
                    log.warning("%s cannot join: %s", self._replicas.label(replica.id), step.why)
                    fleet.catch_up_failed(replica.id, epoch, step.code, step.why, now_s)
                    return
                case catchup.Wait():
                    await asyncio.sleep(step.seconds)
                case catchup.Look():
                    seen = await self._look(replica, epoch)
                    if seen is None:
                        return
                    if first is None:
                        first = seen
                        await self._rebuild(replica.id, seen)
                        if not await self._fits(replica, seen, epoch):
                            return
                        if seen.identity not in (None, self.run_id):
                            await self._mark(replica.id)
                    # As read back, never as written: not every server keeps what it is told.
                    marker = seen.identity if seen.identity == self.run_id else None
                    plan.looked(
                        seen.listed,
                        paused=seen.paused,
                        pause_target=self._pause.target,
                        ours=first.identity == self.run_id,
                        now_s=self._replicas.now_s(),
                    )
                case _:
                    result, detail = await self._carry_out(replica.id, step)
                    plan.stepped(result, detail, self._replicas.now_s())

    async def _retired_with_files(self) -> frozenset[AdapterName]:
        """Retired names that somebody may still ask for, and whose files can be loaded again."""
        ledger = self._replicas.ledger
        names = ledger.retired_names()[-MAX_SPARE:]
        adapters = [a for name in names if (a := ledger.get(name)) is not None]
        return await asyncio.to_thread(lambda: frozenset(a.name for a in adapters if _has_files(a)))

    async def _look(self, replica: Replica, epoch: int) -> Probe | None:
        """A look, told to the fleet; None when it showed no living vLLM."""
        fleet = self._replicas.fleet
        sent_at_s = self._replicas.now_s()
        fleet.probe_sent(replica.id, sent_at_s)
        seen = await look(self._calls, replica.id, self._replicas.now_s)
        now_s = self._replicas.now_s()
        if isinstance(seen, Failed):
            await self._rebuild(replica.id, None)
            fleet.catch_up_failed(replica.id, epoch, seen.code, seen.detail, now_s)
            moved = fleet.probe_failed(replica.id, seen.code, seen.detail, sent_at_s, now_s)
            self._replicas.apply(moved)
            return None
        self._replicas.apply(fleet.probe_ok(replica.id, seen, now_s))
        return seen

    async def _fits(self, replica: Replica, seen: Probe, epoch: int) -> bool:
        """Whether it can be one of this fleet; warn of what will not work with it."""
        fleet = self._replicas.fleet
        label = self._replicas.label(replica.id)
        now_s = self._replicas.now_s()
        other = self._other_model(replica.id, seen.base_models)
        if other is not None:
            first, models = other
            why = (
                f"serves {', '.join(seen.base_models)}, but {first} serves {', '.join(models)}; "
                "start them with the same model"
            )
            if replica.error_code != "model_differs":
                log.error("%s stays out: it %s", label, why)
            fleet.catch_up_failed(replica.id, epoch, "model_differs", why, now_s)
            return False
        self._models[replica.id] = seen.base_models
        marked = (seen.identity or "").startswith(MARKER_PREFIX)
        if marked and seen.identity not in self._run_ids and replica.was_ready:
            why = f"carries the marker {seen.identity} of another run: two daemons share it"
            log.error("%s stays out: it %s", label, why)
            self._replicas.apply(fleet.exclude(replica.id, "foreign_run", why, now_s))
            return False
        missing = await self._pushing.find(replica.id, label)
        if missing and self._pushing.required:
            now_s = self._replicas.now_s()
            fleet.catch_up_failed(replica.id, epoch, "no_push", missing, now_s)
            log.warning("%s cannot join: it %s", label, missing)
            return False
        if replica.block_tokens is None or seen.identity != self.run_id:
            await self._read_facts(replica, label)
        return replica.epoch == epoch

    def _other_model(
        self, replica: ReplicaId, models: tuple[str, ...]
    ) -> tuple[ReplicaId, tuple[str, ...]] | None:
        """A replica that is up and serves something else, with what it serves.

        One that is down says nothing: it may be the wrong one, and be started anew just now.
        """
        fleet = self._replicas.fleet
        self._models = {
            id: served
            for id, served in self._models.items()
            if id != replica and id in fleet and fleet[id].state is not ReplicaState.DOWN
        }
        return next(((id, had) for id, had in self._models.items() if had != models), None)

    async def _read_facts(self, replica: Replica, label: str) -> None:
        """Block size and LoRA settings; a server that does not tell them is taken as it is."""
        info, route = await asyncio.gather(
            self._calls(
                replica.id, "GET", "/server_info?config_format=json",
                timeout_s=self._control_timeout_s,
            ),
            # Without a name it changes nothing: 400 where the endpoint is, 404 where it is not.
            self._calls(
                replica.id, "POST", "/v1/unload_lora_adapter", b"{}",
                timeout_s=self._control_timeout_s,
            ),
        )  # fmt: skip
        found = None
        if isinstance(info, Answer) and info.ok:
            try:
                value = orjson.loads(info.body)
                found = facts(value) if isinstance(value, dict) else None
            except orjson.JSONDecodeError:
                found = None
        first_time = replica.id not in self._asked
        self._asked.add(replica.id)
        if found is None and first_time:
            log.warning(
                "%s does not tell its settings at /server_info (%s). TRL needs it: start vLLM with "
                "VLLM_SERVER_DEV_MODE=1",
                label,
                info.detail if isinstance(info, NoAnswer) else info.status,
            )
        elif found is not None:
            replica.block_tokens = found.block_tokens
            self.facts[replica.id] = found
            if found.block_tokens:
                self._replicas.use_block_tokens(found.block_tokens)
            if found.lora is None:
                log.warning(
                    "%s runs without --enable-lora: the trainer will fall back to merged weights",
                    label,
                )
        if (
            isinstance(route, Answer)
            and route.status == 404
            and first_time
            and "cannot be found" not in words(route)
        ):
            log.warning(
                "%s cannot load adapters while it runs: start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                label,
            )

    async def _mark(self, replica: ReplicaId) -> None:
        """Leave our marker on the process, for the next look to find."""
        body = {"new_version": self.run_id}
        await self._post(replica, "/update_weight_version", body, self._control_timeout_s)

    async def _carry_out(self, replica: ReplicaId, step: catchup.Step) -> tuple[StepResult, str]:
        """One step of the plan: how it went, in a word and in words."""
        timeout_s = self._control_timeout_s
        match step:
            case catchup.Unload():
                answer = await self._post(
                    replica, "/v1/unload_lora_adapter", {"lora_name": step.name}, timeout_s
                )
                match classify_unload(answer):
                    case UnloadOutcome.GONE:
                        return StepResult.OK, ""
                    case UnloadOutcome.UNKNOWN | UnloadOutcome.NEVER_RECEIVED:
                        return StepResult.UNKNOWN, _words(answer)
                    case _:
                        return StepResult.FAILED, _words(answer)
            case catchup.Load():
                adapter = self._replicas.ledger.get(step.name)
                copy = adapter.copy if adapter is not None else ""
                path = await self._pushing.deliver(replica, copy, step.path)
                if isinstance(path, Undelivered):
                    return StepResult.LATER, path.text
                body = {"lora_name": step.name, "lora_path": path, "load_inplace": False}
                answer = await self._post(
                    replica, "/v1/load_lora_adapter", body, self._attempt_timeout_s
                )
                match classify_load(answer):
                    case LoadOutcome.LOADED:
                        return StepResult.OK, ""
                    case LoadOutcome.NOT_VISIBLE:
                        return StepResult.LATER, _words(answer)
                    case LoadOutcome.ALREADY | LoadOutcome.UNKNOWN | LoadOutcome.NEVER_RECEIVED:
                        return StepResult.UNKNOWN, _words(answer)
                    case _:
                        return StepResult.FAILED, _words(answer)
            case catchup.ResetCache():
                answer = await self._post(replica, RESET, None, timeout_s)
                match classify_reset(answer):
                    case ResetOutcome.CLEARED:
                        return StepResult.OK, ""
                    case ResetOutcome.HELD:
                        return StepResult.LATER, f"cache blocks are still held: {_words(answer)}"
                    case ResetOutcome.ENDPOINT_MISSING:
                        # It can never be cleared, yet may serve; the log warned when it came.
                        return StepResult.OK, "no such endpoint"
                    case ResetOutcome.UNKNOWN:
                        return StepResult.UNKNOWN, _words(answer)
                    case ResetOutcome.FAILED:
                        return StepResult.FAILED, _words(answer)
            case catchup.Pause():
                answer = await self._post(replica, step.target, None, timeout_s)
            case catchup.Resume():
                answer = await self._post(replica, "/resume", None, timeout_s)
        if isinstance(answer, NoAnswer):
            return StepResult.UNKNOWN, answer.detail
        return (StepResult.OK if answer.ok else StepResult.FAILED), _words(answer)

    async def _post(
        self, replica: ReplicaId, target: str, body: object, timeout_s: float
    ) -> Answer | NoAnswer:
        data = orjson.dumps(body) if body is not None else None
        return await self._calls(replica, "POST", target, data, timeout_s=timeout_s)

    def weakest_lora(self) -> LoraLimits:
        """The smallest limits of the replicas that told theirs; None where nobody did."""
        fleet = self._replicas.fleet
        self.facts = {id: found for id, found in self.facts.items() if id in fleet}
        told = [f.lora for f in self.facts.values() if f.lora is not None]

        def least(nth: int) -> int | None:
            return min((n for lora in told if (n := lora[nth]) is not None), default=None)

        return LoraLimits(max_loras=least(0), max_lora_rank=least(1), max_cpu_loras=least(2))

    # Rebuilding the ledger

    async def _rebuild(self, replica: ReplicaId, seen: Probe | None) -> None:
        """At the daemon's start: what all replicas hold alike is what the last daemon left.

        A replica that is up waits here for the others, so that nothing is swept off it that
        belongs to the run.
        """
        if self._rebuilt.is_set():
            return
        self._seen[replica] = seen
        now_s = self._replicas.now_s()
        if self._rebuild_deadline_s is None:
            if seen is None:
                return
            self._rebuild_deadline_s = now_s + REBUILD_S
        if all(r.id in self._seen for r in self._replicas.fleet):
            await self._adopt()
        if seen is not None and not self._rebuilt.is_set():
            try:
                async with asyncio.timeout(max(0.0, self._rebuild_deadline_s - now_s)):
                    await self._rebuilt.wait()
            except TimeoutError:
                await self._adopt()

    async def rebuilt(self) -> None:
        """Until it is known what the last daemon left, or that no replica is there to tell."""
        while not self._rebuilt.is_set():
            if all(r.id in self._seen for r in self._replicas.fleet):
                return
            await self._replicas.changed(LOOK_S)

    async def _adopt(self) -> None:
        """All that can be seen is seen: take over what the last daemon of this run left."""
        if self._adopting:
            await self._rebuilt.wait()
            return
        self._adopting = True
        try:
            journal = await asyncio.to_thread(self._journal.read) if self._journal else None
            await self._take_over(journal)
        finally:
            self._rebuilt.set()
            self._seen.clear()
            self._replicas.rebuilding = False
            self._replicas.notify()

    async def _take_over(self, journal: tuple[str, dict[str, object]] | None) -> None:
        seen = [probe for probe in self._seen.values() if probe is not None]
        # A replica that restarted meanwhile has no marker; those of two runs are nobody's.
        markers = {p.identity for p in seen if p.identity and p.identity.startswith(MARKER_PREFIX)}
        nobody_marked = not markers
        marker = markers.pop() if len(markers) == 1 else None
        if marker is not None:
            self.run_id = marker
            seen = [probe for probe in seen if probe.identity == marker]
        if journal is not None and journal[0] == marker:
            self._restore(journal[1])
        elif journal is not None and nobody_marked:
            # They were all started anew while we were away, or an old run's journal was given.
            self._restore(journal[1])
            await self._keep_what_has_files()
            self.run_id = journal[0]
        else:
            if journal is not None:
                log.warning("the journal is of another run (%s) and is left out", journal[0])
            if marker is not None or all(probe.identity is None for probe in seen):
                self._adopt_common(seen)
            # Else they are of no run of ours: what they list is nobody's, and is swept.
        if self.run_id == marker and all(probe.paused for probe in seen):
            # Weights may be changing in place right now: only the trainer may resume.
            log.warning("the replicas of this run are paused; they stay so until a resume")
            self._pause.found(real=True)
            self._replicas.fleet.expect_paused(True, self._replicas.now_s())

    async def _keep_what_has_files(self) -> None:
        """A name that no replica holds, and that none could load, would keep all from ready."""
        ledger = self._replicas.ledger
        for name in ledger.known_names():
            adapter = ledger.get(name)
            if adapter is not None and not await asyncio.to_thread(_has_files, adapter):
                log.warning("%s is left out of the journal's names: its files are gone", name)
                ledger.retire(name, self._replicas.now_s())
                ledger.forget(name)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """From the journal: also what no replica is there to show. Catching up checks it."""
        ledger = self._replicas.ledger
        try:
            ledger.restore(state["ledger"], self._replicas.now_s())
        except (KeyError, ValueError) as exc:
            log.error("the journal is left out: %s", exc)
            return
        if state.get("pause_query") is not None:
            self._pause.found(real=False, query=str(state["pause_query"]))
        log.info(
            "the ledger is restored from the journal: live %s",
            ", ".join(ledger.live_names()) or "nothing",
        )

    def _adopt_common(self, seen: Sequence[Probe]) -> None:
        """Without a journal: what all replicas hold alike, by its path or by the digest in it."""
        if not seen:
            return

        def holds(probe: Probe) -> set[tuple[str, str]]:
            return {(n, own_copy.digest_in(p) or p) for n, p in probe.listed.items()}

        common = holds(seen[0]).intersection(*map(holds, seen[1:]))
        now_s = self._replicas.now_s()
        for name, held in sorted(common, key=lambda item: (version_of(item[0]) or 0, item[0])):
            path = seen[0].listed[AdapterName(name)]
            digest = held if held != path else ""
            copy = self._pushing.kept(Path(path).name) if digest else ""
            self._replicas.ledger.commit(AdapterName(name), path, now_s, digest=digest, copy=copy)
        if common:
            names = ", ".join(name for name, _ in sorted(common))
            log.info("adapters found on all %d replicas and taken over: %s", len(seen), names)


def _has_files(adapter: LiveAdapter) -> bool:
    """Whether they are seen to be there. Where nothing can be seen from here that is a no, other
    than in ``publishing``: a name that nobody can load would keep every replica from ready."""
    return any(
        (Path(path) / CONFIG).is_file() for path in (adapter.copy, adapter.loaded_from) if path
    )


def _words(answer: Answer | NoAnswer) -> str:
    if isinstance(answer, NoAnswer):
        return f"{answer.cause}: {answer.detail}"
    return f"{answer.status} {words(answer, 500)}"

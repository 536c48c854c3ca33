"""The doctor's verdicts on a fleet, each with what mends it. Pure: symptoms in, findings out.

Checks stand in the order in which they keep a run from starting. A replica that fails one of the
first four (``BARRIERS``) is left out of the rest: nothing more is known of it. A check's
docstring, cut at ``Fix:``, is its row in ``docs/doctor.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from broadcast.joins import disagreements
from deploy.hf_jobs.plan import RANKS
from deploy.reading import BARRIERS, Ailment, Level, fail, read, warn
from deploy.symptoms import BEACON_PREFIX, Asked, Held, PushUse, Sighting, Symptoms, TokenUse
from proxy.control import POLICY_PREFIX
from proxy.rejoin import MARKER_PREFIX
from proxy.upstream import IDLE_S
from routing.ids import ReplicaId

KNOWN_VERSION = "0.27.1"
"""The vLLM that rollmux is tested with."""
SPARE_COPIES = 2
"""Copies in CPU memory for each slot, at least: an adapter pushed out of both is read from its
files again inside the engine, which dies if they are gone (vLLM 0.27.1, tried three ways)."""
SLOW_BEACON_S = 10.0
"""A published run waited 8.5 s for its bucket at each sync, once the mount was mended."""
SHOWN = 4
"""Replicas named in one line; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was seen and what mends it. ``replicas`` are those it is about."""

    check: str
    level: Level
    seen: str
    fix: str = ""
    replicas: tuple[ReplicaId, ...] = ()


class Fleet:
    """All readings, and the two kinds of replica that most checks are about."""

    def __init__(self, symptoms: Sequence[Symptoms], asked: Asked) -> None:
        self.asked = asked
        self.all = tuple(read(each) for each in symptoms)
        self.open = tuple(r for r in self.all if r.barrier is None)
        """Those that answer as vLLM does."""
        self.facts = {r.id: r.facts for r in self.open if r.facts is not None}
        """Those that tell their settings."""
        self.urls = {r.id: r.url for r in self.all}
        self.tls = any(url.startswith("https://") for url in self.urls.values())
        self.tokens = {each.id: each.token for each in symptoms}

    def loadable(self) -> tuple[ReplicaId, ...]:
        """Those that a beacon can be loaded on."""
        return tuple(
            r.id for r in self.open if r.runtime_lora and (r.facts is None or r.facts.lora)
        )

    def idle(self) -> dict[ReplicaId, str]:
        """Those that may be paused for a moment, and their base model."""
        return {
            r.id: r.base[0]
            for r in self.open
            if r.dev_mode and r.base and not (r.running or r.paused or r.asleep)
        }

    def who(self, replicas: Iterable[ReplicaId]) -> str:
        named = [f"{id} ({self.urls[id]})" for id in replicas]
        rest = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        return ", ".join(named[:SHOWN]) + rest


Check = Callable[[Fleet], Finding]
CHECKS: dict[str, Check] = {}
"""By name, in the order of the report."""


def diagnose(fleet: Fleet) -> tuple[Finding, ...]:
    """One finding a check."""
    return tuple(check(fleet) for check in CHECKS.values())


def _check(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


# --- making findings ----------------------------------------------------------------------------


def _lora_limits(fleet: Fleet, place: int) -> dict[ReplicaId, int]:
    """Of each replica that tells it; ``place`` is that in ``Facts.lora``."""
    found = {id: facts.lora[place] for id, facts in fleet.facts.items() if facts.lora}
    return {id: limit for id, limit in found.items() if limit is not None}


def _finding(
    check: str,
    fleet: Fleet,
    asked: Sequence[ReplicaId],
    ailing: Mapping[ReplicaId, Ailment],
    fine: str,
) -> Finding:
    """One line for what was found on the replicas that could be ``asked``."""
    if not asked:
        return Finding(check, Level.SKIP, "no replica could be asked; mend the above first")
    if not ailing:
        return Finding(check, Level.OK, fine)
    by_seen: dict[str, list[ReplicaId]] = {}
    for id, ailment in ailing.items():
        by_seen.setdefault(ailment.seen, []).append(id)
    seen = "; ".join(f"{fleet.who(ids)}: {text}" for text, ids in by_seen.items())
    fixes = dict.fromkeys(ailment.fix for ailment in ailing.values())
    failed = any(ailment.level is Level.FAIL for ailment in ailing.values())
    level = Level.FAIL if failed else Level.WARN
    return Finding(check, level, seen, "; ".join(fixes), tuple(ailing))


def _barrier_finding(check: str, fleet: Fleet, fine: str) -> Finding:
    """For a check that a replica passes on its way to the next."""
    earlier = BARRIERS[: BARRIERS.index(check)]
    asked = [r.id for r in fleet.all if r.barrier is None or r.barrier[0] not in earlier]
    ailing = {r.id: r.barrier[1] for r in fleet.all if r.barrier and r.barrier[0] == check}
    return _finding(check, fleet, asked, ailing, fine)


def _by_value(values: Mapping[ReplicaId, object]) -> str:
    """``a on r0, r1; b on r2``."""
    groups: dict[str, list[ReplicaId]] = {}
    for id, value in values.items():
        shown = "not told" if value is None else f"{value}"
        groups.setdefault(shown, []).append(id)
    return "; ".join(f"{value} on {', '.join(ids)}" for value, ids in groups.items())


def _equal(check: str, fleet: Fleet, name: str, level: Level, fix: str) -> Finding:
    """For a fact that has to be the same on all."""
    if not fleet.facts:
        return _finding(check, fleet, (), {}, "")
    wrong = disagreements(fleet.facts, (name,))
    if wrong:
        values = wrong[name]
        return Finding(check, level, f"it differs: {_by_value(values)}", fix, tuple(values))
    (value,) = {getattr(f, name) for f in fleet.facts.values()}
    return Finding(check, Level.OK, "not told" if value is None else f"{value}")


# --- checks, in the order of the report ---------------------------------------------------------


@_check("reachable")
def _reachable(fleet: Fleet) -> Finding:
    """Every replica accepts a connection and answers.

    Fix: start vLLM there with `--host 0.0.0.0`; check host name, port and firewall.
    """
    if not fleet.all:
        fix = "check --replica, --replicas-file, --replicas-dns and --replicas-hf-label"
        return Finding("reachable", Level.FAIL, "there is no replica", fix)
    return _barrier_finding("reachable", fleet, f"{len(fleet.all)} replicas answer")


@_check("tls")
def _tls(fleet: Fleet) -> Finding:
    """Certificates are trusted, and `http://` and `https://` are where they should be.

    Fix: `--ca-file PATH` for a private certificate authority; else mend the URL.
    """
    fine = "certificates are trusted" if fleet.tls else "not used"
    return _barrier_finding("tls", fleet, fine)


@_check("token")
def _token(fleet: Fleet) -> Finding:
    """The bearer token is accepted: by an edge in front of the replica, or by vLLM's own
    `--api-key`; the line says which of them refused.

    Fix: `--token-env NAME` or `--token-file PATH` with a token that may read the Job's namespace.
    """
    sent = sum(fleet.tokens[r.id] is TokenUse.SENT for r in fleet.open)
    fine = f"accepted by {sent} replicas" if sent else "none is needed"
    return _barrier_finding("token", fleet, fine)


@_check("vllm")
def _vllm(fleet: Fleet) -> Finding:
    """What answers is a living vLLM, and not an edge's page or a server whose engine died.

    Fix: give the server's own URL; wait until it has started; restart it.
    """
    names = ", ".join(sorted({name for r in fleet.open for name in r.base}))
    return _barrier_finding("vllm", fleet, f"alive, serving {names}")


@_check("distinct")
def _distinct(fleet: Fleet) -> Finding:
    """No server is listed under two URLs, and no URL leads to several servers in turn.

    Fix: keep one URL a server; instead of a balancer's name give `--replicas-dns HOST:PORT`.
    """
    asked = [r.id for r in fleet.open if r.instances]
    ailing: dict[ReplicaId, Ailment] = {}
    owners: dict[str, ReplicaId] = {}
    for r in fleet.open:
        if len(r.instances) > 1:
            ailing[r.id] = fail(
                f"{len(r.instances)} servers take turns behind this URL",
                "give each server's own URL; for a balancer's or a service's name, "
                "--replicas-dns HOST:PORT with a headless one",
            )
        for instance in r.instances:
            first = owners.setdefault(instance, r.id)
            if first != r.id and r.id not in ailing:
                ailing[r.id] = fail(f"is the same server as {first}", "list each server once")
    return _finding("distinct", fleet, asked, ailing, f"{len(asked)} URLs, {len(asked)} servers")


@_check("dev_mode")
def _dev_mode(fleet: Fleet) -> Finding:
    """The development endpoints are there: TRL needs `/pause`, `/resume` and `/server_info`.

    Fix: start vLLM with `VLLM_SERVER_DEV_MODE=1`.
    """
    fix = "start vLLM with VLLM_SERVER_DEV_MODE=1"
    ailing = {}
    for r in fleet.open:
        if not r.dev_mode:
            ailing[r.id] = fail("no /is_paused: not in server dev mode", fix)
        elif r.facts is None:
            ailing[r.id] = fail("/server_info does not tell its settings", fix)
    return _finding("dev_mode", fleet, [r.id for r in fleet.open], ailing, "on")


@_check("runtime_lora")
def _runtime_lora(fleet: Fleet) -> Finding:
    """Adapters can be loaded while the server runs.

    Fix: start vLLM with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
    """
    fix = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    ailing = {r.id: fail("no /v1/load_lora_adapter", fix) for r in fleet.open if not r.runtime_lora}
    return _finding("runtime_lora", fleet, [r.id for r in fleet.open], ailing, "on")


@_check("lora")
def _lora(fleet: Fleet) -> Finding:
    """LoRA is enabled; without it TRL falls back to syncing merged weights.

    Fix: start vLLM with `--enable-lora`.
    """
    fix = "start vLLM with --enable-lora"
    ailing = {id: fail("LoRA is off", fix) for id, f in fleet.facts.items() if f.lora is None}
    return _finding("lora", fleet, tuple(fleet.facts), ailing, "enabled")


@_check("version")
def _version(fleet: Fleet) -> Finding:
    """All replicas run one version of vLLM, the one that rollmux is tested with.

    Fix: start all from one image, such as `vllm/vllm-openai:v0.27.1`.
    """
    versions = {r.id: r.version.partition("+")[0] for r in fleet.open}  # 0.27.1+cpu
    fix = f"start all from one image, such as vllm/vllm-openai:v{KNOWN_VERSION}"
    if len(set(versions.values())) > 1:
        seen = f"it differs: {_by_value(versions)}"
        return Finding("version", Level.FAIL, seen, fix, tuple(versions))
    ailing = {
        id: warn(f"vLLM {version}; rollmux is tested with {KNOWN_VERSION}", fix)
        for id, version in versions.items()
        if version != KNOWN_VERSION
    }
    return _finding("version", fleet, tuple(versions), ailing, f"vLLM {KNOWN_VERSION}")


@_check("model")
def _model(fleet: Fleet) -> Finding:
    """All replicas serve the same model, under the same name.

    Fix: start all with the same model and `--served-model-name`.
    """
    fix = "start all with the same model and --served-model-name"
    names = {r.id: ", ".join(r.base) for r in fleet.open}
    if len(set(names.values())) > 1:
        seen = f"the names differ: {_by_value(names)}"
        return Finding("model", Level.FAIL, seen, fix, tuple(names))
    return _equal("model", fleet, "model", Level.FAIL, fix)


@_check("dtype")
def _dtype(fleet: Fleet) -> Finding:
    """All compute in the same precision.

    Fix: start all with the same `--dtype`.
    """
    return _equal("dtype", fleet, "dtype", Level.FAIL, "start all with the same --dtype")


@_check("logprobs_mode")
def _logprobs_mode(fleet: Fleet) -> Finding:
    """Log-probabilities mean the same everywhere, and what the trainer takes them for: those of the
    distribution that was sampled from.

    Fix: start all with `--logprobs-mode processed_logprobs`.
    """
    fix = "start all with --logprobs-mode processed_logprobs"
    found = _equal("logprobs_mode", fleet, "logprobs_mode", Level.FAIL, fix)
    if found.level is Level.OK and found.seen != "processed_logprobs":
        seen = f"{found.seen}: without temperature, so the trainer's ratios are off"
        return Finding("logprobs_mode", Level.WARN, seen, fix, tuple(fleet.facts))
    return found


@_check("block_size")
def _block_size(fleet: Fleet) -> Finding:
    """All cut prompts into blocks of one size, by which requests are routed.

    Fix: start all with the same `--block-size`.
    """
    return _equal(
        "block_size", fleet, "block_tokens", Level.FAIL, "start all with the same --block-size"
    )


@_check("data_parallel_size")
def _data_parallel_size(fleet: Fleet) -> Finding:
    """All have the same number of data-parallel ranks.

    Fix: start all with the same `--data-parallel-size`.
    """
    fix = "start all with the same --data-parallel-size"
    return _equal("data_parallel_size", fleet, "data_parallel_size", Level.FAIL, fix)


@_check("max_model_len")
def _max_model_len(fleet: Fleet) -> Finding:
    """All take prompts of the same length; the trainer is told the least.

    Fix: start all with the same `--max-model-len`.
    """
    fix = "start all with the same --max-model-len; the trainer is told the least"
    return _equal("max_model_len", fleet, "max_model_len", Level.WARN, fix)


@_check("generation_config")
def _generation_config(fleet: Fleet) -> Finding:
    """No default of a model's `generation_config.json` is mixed into the trainer's sampling.

    Fix: start all with `--generation-config vllm`.
    """
    fix = "start all with --generation-config vllm"
    found = _equal("generation_config", fleet, "generation_config", Level.FAIL, fix)
    if found.level is Level.OK and found.seen != "vllm":
        seen = f"{found.seen}: the model's own sampling defaults are in force"
        return Finding("generation_config", Level.WARN, seen, fix, tuple(fleet.facts))
    return found


@_check("slots")
def _slots(fleet: Fleet) -> Finding:
    """There is a slot for each policy that may be in use at once: `max_loras` is at least the
    trainer's max staleness (`--staleness`) + 2.

    Fix: start vLLM with `--max-loras` staleness + 2, or lower the trainer's `max_staleness`.
    """
    need = fleet.asked.staleness + 2
    fix = f"start vLLM with --max-loras {need}, or lower the trainer's max_staleness"
    slots = _lora_limits(fleet, 0)
    ailing = {
        id: fail(f"max_loras {n}, but staleness {fleet.asked.staleness} needs {need}", fix)
        for id, n in slots.items()
        if n < need
    }
    fine = f"max_loras {min(slots.values(), default=0)}, of which {need} are needed"
    return _finding("slots", fleet, tuple(slots), ailing, fine)


@_check("cpu_slots")
def _cpu_slots(fleet: Fleet) -> Finding:
    """Copies in CPU memory (`max_cpu_loras`) are twice the slots needed or more: an engine dies
    when it has to read an adapter again whose files the trainer has deleted.

    Fix: start vLLM with a larger `--max-cpu-loras`; it costs CPU memory only.
    """
    need = SPARE_COPIES * (fleet.asked.staleness + 2)
    fix = f"start vLLM with --max-cpu-loras {2 * need}; it costs CPU memory only"
    slots = _lora_limits(fleet, 2)
    ailing = {
        id: warn(f"max_cpu_loras {n} is less than {need}", fix)
        for id, n in slots.items()
        if n < need
    }
    fine = f"max_cpu_loras {min(slots.values(), default=0)}"
    return _finding("cpu_slots", fleet, tuple(slots), ailing, fine)


@_check("rank")
def _rank(fleet: Fleet) -> Finding:
    """Every replica takes adapters of the rank that is trained (`--rank`); the least counts.

    Fix: start vLLM with a `--max-lora-rank` of at least that (8, 16, 32, 64, 128, 256, 320, 512).
    """
    ranks = _lora_limits(fleet, 1)
    least = min(ranks.values(), default=0)
    wanted = fleet.asked.rank
    if wanted is not None:
        allowed = next((r for r in RANKS if r >= wanted), None)
        fix = f"start vLLM with --max-lora-rank {allowed}"
        if allowed is None:
            fix = f"train a lower rank: vLLM takes none above {RANKS[-1]}"
        ailing = {
            id: fail(f"max_lora_rank {rank} is less than {wanted}", fix)
            for id, rank in ranks.items()
            if rank < wanted
        }
    elif len(set(ranks.values())) > 1:
        fix = "start all with the same --max-lora-rank, or say with --rank N what you train"
        seen = f"max_lora_rank differs: {_by_value(ranks)}"
        return Finding("rank", Level.WARN, seen, fix, tuple(ranks))
    else:
        ailing = {}
    return _finding("rank", fleet, tuple(ranks), ailing, f"up to {least}")


@_check("busy")
def _busy(fleet: Fleet) -> Finding:
    """Nobody else's requests are running; `rollmux run` refuses to start while they are.

    Fix: wait for them to end, or insist with `rollmux run --take-over`.
    """
    fix = "wait for them to end, or insist with rollmux run --take-over"
    ailing = {
        r.id: fail(f"{r.running} requests of someone else", fix) for r in fleet.open if r.running
    }
    return _finding("busy", fleet, [r.id for r in fleet.open], ailing, "idle")


@_check("asleep")
def _asleep(fleet: Fleet) -> Finding:
    """No replica is asleep; rollmux does not wake one that somebody put to sleep.

    Fix: `curl -X POST URL/wake_up`.
    """
    ailing = {
        r.id: fail("asleep", f"wake it: curl -X POST {r.url}/wake_up")
        for r in fleet.open
        if r.asleep
    }
    return _finding("asleep", fleet, [r.id for r in fleet.open if r.dev_mode], ailing, "none")


@_check("paused")
def _paused(fleet: Fleet) -> Finding:
    """No replica is paused, as a trainer leaves it that died in the middle of a sync.

    Fix: nothing if no trainer uses it, rollmux resumes it; else take it out of this fleet.
    """
    ailing = {
        r.id: warn(
            "paused",
            f"nothing, if no trainer uses it: rollmux resumes it (or curl -X POST {r.url}/resume)",
        )
        for r in fleet.open
        if r.paused and not r.asleep
    }
    return _finding("paused", fleet, [r.id for r in fleet.open if r.dev_mode], ailing, "none")


@_check("marker")
def _marker(fleet: Fleet) -> Finding:
    """No replica carries the marker of another run of rollmux.

    Fix: nothing if that run is over; two daemons must not share a replica.
    """
    fix = "nothing if that run is over; else stop it, or take the replica out of this fleet"
    ailing = {
        r.id: warn(f"the marker of run {r.marker}", fix)
        for r in fleet.open
        if r.marker.startswith(MARKER_PREFIX)
    }
    return _finding("marker", fleet, [r.id for r in fleet.open if r.dev_mode], ailing, "none")


@_check("names")
def _names(fleet: Fleet) -> Finding:
    """No adapter has the base model's name, which it would hide, and an unknown name is refused by
    vLLM instead of being served from the base model.

    Fix: unload that adapter; start vLLM without `VLLM_SKIP_MODEL_NAME_VALIDATION`.
    """
    ailing = {}
    for r in fleet.open:
        hidden = [name for name in r.adapters if name in r.base]
        if hidden:
            fix = f'unload it: POST {r.url}/v1/unload_lora_adapter {{"lora_name": "{hidden[0]}"}}'
            ailing[r.id] = fail(f"an adapter called {hidden[0]} hides the base model", fix)
        elif (r.env or {}).get("VLLM_SKIP_MODEL_NAME_VALIDATION"):
            ailing[r.id] = fail(
                "VLLM_SKIP_MODEL_NAME_VALIDATION is on: it serves the base model under any name",
                "start vLLM without VLLM_SKIP_MODEL_NAME_VALIDATION",
            )
    return _finding("names", fleet, [r.id for r in fleet.open], ailing, "none collide")


@_check("adapters")
def _adapters(fleet: Fleet) -> Finding:
    """No adapters of an earlier trainer (`trl-policy-*`) are left over.

    Fix: nothing under `rollmux run`, which unloads them at its start; else unload them.
    """
    fix = "nothing under rollmux run, which unloads them; else POST /v1/unload_lora_adapter"
    ailing = {}
    for r in fleet.open:
        left = [name for name in r.adapters if name.startswith((POLICY_PREFIX, BEACON_PREFIX))]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            ailing[r.id] = warn(f"left over: {', '.join(left[:3])}{more}", fix)
    others = sum(len(r.adapters) for r in fleet.open)
    fine = f"{others} others, not touched" if others else "none left over"
    return _finding("adapters", fleet, [r.id for r in fleet.open], ailing, fine)


@_check("prefix_caching")
def _prefix_caching(fleet: Fleet) -> Finding:
    """Prefix caching is on; without it nothing is gained by routing a prompt to where it was.

    Fix: start vLLM without `--no-enable-prefix-caching`.
    """
    fix = "start vLLM without --no-enable-prefix-caching, or use --router least-loaded"
    ailing = {id: warn("off", fix) for id, f in fleet.facts.items() if f.prefix_caching is False}
    return _finding("prefix_caching", fleet, tuple(fleet.facts), ailing, "on")


@_check("keep_alive")
def _keep_alive(fleet: Fleet) -> Finding:
    """Idle connections stay open longer at vLLM than here, so that none is closed under a request.

    Fix: start vLLM with `VLLM_HTTP_TIMEOUT_KEEP_ALIVE` at its default of 5 or higher.
    """
    told = {r.id: (r.env or {}).get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") for r in fleet.open}
    seconds = {id: n for id, n in told.items() if isinstance(n, int | float)}
    if not seconds:
        return Finding("keep_alive", Level.SKIP, "no replica tells")
    fix = f"start vLLM with VLLM_HTTP_TIMEOUT_KEEP_ALIVE above {IDLE_S:g}; 75 is good"
    ailing = {
        id: warn(f"idle connections are closed after {n:g} s, ours after {IDLE_S:g} s", fix)
        for id, n in seconds.items()
        if n <= IDLE_S
    }
    return _finding(
        "keep_alive", fleet, tuple(seconds), ailing, f"{min(seconds.values()):g} s or more"
    )


@_check("push")
def _push(fleet: Fleet) -> Finding:
    """How adapters will get to each replica: pushed to its own endpoint, or by the shared path.

    Fix: give the endpoint's key with `--push-key-env NAME`; start vLLM with the middleware.
    """
    ailing = {}
    for r in fleet.open:
        if r.push is PushUse.TROUBLE:
            fix = "give the key that the replica has as ROLLMUX_PUSH_KEY with --push-key-env NAME"
            level = Level.FAIL if fleet.asked.push_required else Level.WARN
            ailing[r.id] = Ailment(level, r.push_trouble, fix)
        elif r.push is PushUse.ABSENT and fleet.asked.push_required:
            ailing[r.id] = fail(
                "it has no push endpoint",
                "start vLLM with --middleware rollmux_push.AdapterPush, "
                "or leave --adapter-transport at auto",
            )
    pushed = [r.id for r in fleet.open if r.push is PushUse.PUSHED]
    by_path = [r.id for r in fleet.open if r.push is not PushUse.PUSHED]
    parts = [f"pushed to {', '.join(pushed)}"] if pushed else []
    parts += [f"by the shared path to {', '.join(by_path)}"] if by_path else []
    return _finding("push", fleet, pushed + by_path, ailing, "; ".join(parts))


@_check("beacon")
def _beacon(fleet: Fleet) -> Finding:
    """How long after it is written below `--beacon DIR` every replica can load an adapter.

    Fix: mount the folder at the same path on the replicas; update an old hf-mount, or push.
    """
    beacon = fleet.asked.beacon
    if beacon is None:
        return Finding("beacon", Level.SKIP, "not asked; --beacon DIR measures it")
    if isinstance(beacon, str):
        fix = "give the folder in which the trainer writes its adapters"
        return Finding("beacon", Level.FAIL, beacon, fix)
    ailing = {id: a for id, s in beacon.items() if (a := _dim(s)) is not None}
    times = ", ".join(f"{id} {_seconds(s)}" for id, s in list(beacon.items())[:8])
    return _finding("beacon", fleet, tuple(beacon), ailing, f"from write to load: {times}")


def _dim(sighting: Sighting) -> Ailment | None:
    if sighting.trouble:
        return fail(
            f"not loaded after {sighting.seconds:.1f} s: {sighting.trouble}",
            "mount the folder on the replica at the same path (read-only will do), "
            "or start it with the push endpoint",
        )
    if sighting.seconds > SLOW_BEACON_S:
        return warn(
            f"seen only {_seconds(sighting)} after the write",
            "a mount that remembers what is not there: update hf-mount (its PR 226), use "
            "--bucket-gate, or start replicas with the push endpoint",
        )
    return None


def _seconds(sighting: Sighting) -> str:
    how = " (pushed)" if sighting.pushed else ""
    return f"{sighting.seconds:.2f} s{how}"


@_check("hold")
def _hold(fleet: Fleet) -> Finding:
    """A reply that takes `--hold-reply-s N` comes through whole, whatever is in between.

    Fix: raise the read and idle timeouts of proxies and balancers in between, or go around them.
    """
    held = fleet.asked.held
    if held is None:
        return Finding("hold", Level.SKIP, "not asked; --hold-reply-s N measures it")
    fix = (
        "raise the read and idle timeouts of what is in between (proxy_read_timeout and the like), "
        "go around it (a network group), or make replies shorter"
    )
    ailing = {id: fail(_cut(h), fix) for id, h in held.items() if h.trouble}
    shortest = min((h.seconds for h in held.values()), default=0.0)
    return _finding("hold", fleet, tuple(held), ailing, f"held for {shortest:.0f} s and came whole")


def _cut(held: Held) -> str:
    return f"cut off after {held.seconds:.1f} s: {held.trouble}"


# --- the page -----------------------------------------------------------------------------------


def table() -> str:
    """The table in ``docs/doctor.md``: one row a check."""
    rows = ["| check | what it means when it is fine | if not |", "|---|---|---|"]
    for name, check in CHECKS.items():
        meaning, _, fix = (inspect.getdoc(check) or "").partition("\n\nFix: ")
        rows.append(f"| `{name}` | {_cell(meaning)} | {_cell(fix)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    words_of = " ".join(text.split()).replace("|", "\\|")
    return words_of[:1].upper() + words_of[1:]

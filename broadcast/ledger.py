"""The ledger: what every replica ought to hold, and what was promised to the trainer.

A name is *live* from its commit until the trainer unloads it, then *retired* until it is forgotten.
A retired name is still served: the trainer freezes a request's model name across its retries
(TRL 1.16, async_rollout_worker.py, ``model_name`` in the payload built once), and a 404 for ninety
of them ends the run. It is forgotten once nobody has named it for the grace time, or at once when
its files are gone and no request of it runs, because an engine that evicted it would die reading it
back (vLLM 0.27.1, lora/worker_manager.py).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from routing.ids import AdapterName

MAX_RETIRED = 256
"""Retired names kept. A trainer retires one per sync, so this is hours at any sane grace time; the
oldest is forgotten first. Costs a few hundred bytes each."""
MAX_RESIDENT = 1024
"""Names followed in the picture of the engines' slots; ``max_cpu_loras`` is far below it."""

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name to shape, of one adapter."""

_VERSION = re.compile(r"-v(\d{1,18})$")


def version_of(name: str) -> int | None:
    """The number at the end of ``trl-policy-v7``; None for a name without one.

    TRL 1.16, async_grpo_trainer.py: ``trl-policy-v{model_version}``.
    """
    found = _VERSION.search(name)
    return int(found.group(1)) if found else None


@dataclass(frozen=True, slots=True)
class LiveAdapter:
    """One committed adapter."""

    name: AdapterName
    path: str
    """As the trainer gave it; what ``/v1/models`` shows the trainer."""
    loaded_from: str
    """What the replicas were told: ``path``, or the daemon's own copy."""
    digest: str
    """Of the files, in hex; empty where they cannot be read from here."""
    version: int | None
    committed_at_s: float
    copy: str = ""
    """The daemon's own copy; empty without one."""

    def is_at(self, path: str) -> bool:
        """Whether a replica that lists this path holds these files."""
        return path == self.loaded_from or self.names_the_bytes(path)

    def names_the_bytes(self, path: str) -> bool:
        """Two loads of ``path`` cannot have seen different files, and they were these."""
        if path == self.loaded_from and self.loaded_from != self.path:
            return True
        return bool(self.digest) and path.rstrip("/").endswith(f"-{self.digest}")


def _plain(adapter: LiveAdapter) -> dict[str, str]:
    return {
        "name": adapter.name,
        "path": adapter.path,
        "loaded_from": adapter.loaded_from,
        "copy": adapter.copy,
        "digest": adapter.digest,
    }


@dataclass(slots=True)
class Retired:
    """A name the trainer has unloaded and that is served still."""

    adapter: LiveAdapter
    retired_at_s: float
    last_named_s: float


class Ledger:
    """The desired state. ``revision`` grows with every change a replica has to follow."""

    def __init__(self, *, retire_grace_s: float = 60.0) -> None:
        self.retire_grace_s = retire_grace_s
        self.revision = 0
        self.cache_clears = 0
        """How often the trainer, or a takeover, has had every prefix cache cleared."""
        self.first_shapes: Shapes | None = None
        """Tensor shapes of this run's first adapter."""
        self.in_place_changed = False
        """Weights were changed in place: the names say nothing about them."""
        self._live: dict[AdapterName, LiveAdapter] = {}
        self._retired: OrderedDict[AdapterName, Retired] = OrderedDict()
        # Names an engine has a copy of, least recently loaded or named first. An unload does not
        # free the slot (vLLM issue 54839), so an unloaded name stays until it is pushed out.
        self._resident: OrderedDict[AdapterName, None] = OrderedDict()
        self._commits = 0
        self._latest: LiveAdapter | None = None

    def __repr__(self) -> str:
        return f"<Ledger live {list(self._live)} retired {list(self._retired)}>"

    # Reading

    @property
    def live(self) -> tuple[LiveAdapter, ...]:
        """In order of commit."""
        return tuple(self._live.values())

    def live_names(self) -> tuple[AdapterName, ...]:
        return tuple(self._live)

    def known_names(self) -> tuple[AdapterName, ...]:
        return (*self._live, *self._retired)

    def retired_names(self) -> tuple[AdapterName, ...]:
        """Oldest first."""
        return tuple(self._retired)

    def known(self, name: str) -> bool:
        """Live or retired: a request for it is legitimate."""
        return name in self._live or name in self._retired

    def get(self, name: str) -> LiveAdapter | None:
        """The adapter of a live or retired name."""
        adapter = self._live.get(AdapterName(name))
        if adapter is None:
            retired = self._retired.get(AdapterName(name))
            adapter = retired.adapter if retired else None
        return adapter

    @property
    def latest(self) -> LiveAdapter | None:
        """The adapter committed last, if it is live still."""
        latest = self._latest
        return latest if latest is not None and self._live.get(latest.name) is latest else None

    @property
    def policy_version(self) -> int:
        """Of the adapter committed last: the number in its name, else how many were committed."""
        if self._latest is None:
            return 0
        return self._commits if self._latest.version is None else self._latest.version

    # Changing

    def commit(
        self,
        name: AdapterName,
        path: str,
        now_s: float,
        *,
        loaded_from: str = "",
        digest: str = "",
        copy: str = "",
    ) -> LiveAdapter:
        """Every routable replica holds ``name`` now. A name committed again moves to the end."""
        adapter = LiveAdapter(
            name, path, loaded_from or path, digest, version_of(name), now_s, copy
        )
        self._live.pop(name, None)
        self._retired.pop(name, None)
        self._live[name] = adapter
        self._latest = adapter
        self._commits += 1
        self.revision += 1
        self._touch(name)
        return adapter

    def retire(self, name: str, now_s: float) -> bool:
        """The trainer has unloaded ``name``. False if it was not live."""
        adapter = self._live.pop(AdapterName(name), None)
        if adapter is None:
            return False
        self._retired[adapter.name] = Retired(adapter, now_s, last_named_s=now_s)
        self.revision += 1
        return True

    def named(self, name: str, now_s: float) -> None:
        """A request named it. Cheap: called for every generation of an adapter."""
        key = AdapterName(name)
        if key in self._resident:
            self._resident.move_to_end(key)
        retired = self._retired.get(key)
        if retired is not None:
            retired.last_named_s = now_s

    def retirable(
        self,
        now_s: float,
        inflight: Collection[str],
        unreadable: Collection[str] = frozenset(),
    ) -> tuple[AdapterName, ...]:
        """Retired names that replicas should be told to unload now.

        ``inflight`` are names of running requests, ``unreadable`` names whose files are gone.
        """
        surplus = len(self._retired) - MAX_RETIRED
        return tuple(
            name
            for nth, (name, retired) in enumerate(self._retired.items())
            if name not in inflight
            and (
                name in unreadable
                or now_s - retired.last_named_s >= self.retire_grace_s
                or nth < surplus
            )
        )

    def forget(self, name: str) -> bool:
        """A retired name is not served any more. False if it was not retired."""
        gone = self._retired.pop(AdapterName(name), None) is not None
        self.revision += gone
        return gone

    def cache_cleared(self) -> int:
        """Every prefix cache has to be cleared: the count that who has done so has seen."""
        self.cache_clears += 1
        self.revision += 1
        return self.cache_clears

    def weights_changed_in_place(self) -> None:
        self.in_place_changed = True
        self.revision += 1

    # Outliving the daemon

    def snapshot(self) -> dict[str, object]:
        """What a journal keeps: plain values. No times: they mean nothing to another process."""
        return {
            "live": [_plain(adapter) for adapter in self._live.values()],
            "retired": [_plain(retired.adapter) for retired in self._retired.values()],
            "cache_clears": self.cache_clears,
            "in_place_changed": self.in_place_changed,
            "first_shapes": {k: list(v) for k, v in (self.first_shapes or {}).items()},
        }

    def restore(self, snapshot: Mapping[str, object], now_s: float) -> None:
        """Take a snapshot's state, in a ledger that holds nothing yet. Raises ValueError."""
        try:
            live, retired = snapshot["live"], snapshot["retired"]
            assert isinstance(live, list)
            assert isinstance(retired, list)
            for plain in (*retired, *live):
                self.commit(
                    AdapterName(plain["name"]),
                    plain["path"],
                    now_s,
                    loaded_from=plain["loaded_from"],
                    digest=plain["digest"],
                    copy=plain["copy"],
                )
            for plain in retired:
                self.retire(plain["name"], now_s)
            shapes = snapshot["first_shapes"]
            assert isinstance(shapes, dict)
            self.first_shapes = {k: tuple(v) for k, v in shapes.items()} or None
            self.in_place_changed = snapshot["in_place_changed"] is True
            clears = snapshot["cache_clears"]
            assert isinstance(clears, int)
            self.cache_clears = clears
        except (AssertionError, KeyError, TypeError) as exc:
            raise ValueError(f"not a snapshot of a ledger: {type(exc).__name__} {exc}") from exc

    # Slots

    def next_evicted(self, max_cpu_loras: int) -> tuple[AdapterName, ...]:
        """Names whose copies the next load would push out of an engine with so many slots.

        Least recently used goes first (vLLM 0.27.1, lora/worker_manager.py,
        LRUCacheWorkerLoRAManager). Use is followed for the fleet as a whole, not per replica.
        """
        surplus = max(0, len(self._resident) + 1 - max_cpu_loras)
        return tuple(self._resident)[:surplus]

    def loaded(self, name: AdapterName) -> None:
        """An engine has been given ``name``, whether or not it will be committed."""
        self._touch(name)

    def slot_warnings(
        self, max_loras: int | None, max_cpu_loras: int | None, most_live: int | None = None
    ) -> tuple[str, ...]:
        """Lines for an operator whose replicas have too few adapter slots, empty if all is well.

        ``most_live`` is the most names that are live at once where it is known (staleness + 1 for
        TRL); without it, what is live now counts. One more is loaded before the oldest goes.
        """
        live = max(len(self._live), most_live or 0)
        needed = live + 1
        out = []
        if max_loras is not None and live and max_loras < needed:
            out.append(
                f"max_loras is {max_loras}, and {needed} adapters are loaded at once during a "
                f"sync: requests of one will wait for another's to end. Start vLLM with "
                f"--max-loras {needed}"
            )
        if max_cpu_loras is not None and live and max_cpu_loras < 2 * needed:
            out.append(
                f"max_cpu_loras is {max_cpu_loras}: an unload frees no slot, so the copies of "
                f"adapters still in use can be pushed out and must be read again. Start vLLM "
                f"with --max-cpu-loras {2 * needed} or more (it costs host memory only)"
            )
        return tuple(out)

    def _touch(self, name: AdapterName) -> None:
        self._resident[name] = None
        self._resident.move_to_end(name)
        while len(self._resident) > MAX_RESIDENT:
            self._resident.popitem(last=False)

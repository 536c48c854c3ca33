"""The pause: what the trainer was told, and whether the replicas really stand still.

Rules:

1. ``lazy`` acknowledges ``/pause?mode=keep`` and stops nobody, because a new adapter beside the old
   ones needs no pause. Any other parameter, or another mode, asks for an effect on the replicas
   and is always real. ``eager`` always broadcasts.
2. The query string is kept byte for byte and is what reaches the replicas, then or later: without
   ``mode=keep`` vLLM cuts running generations and answers them 200 (vLLM 0.27.1,
   entrypoints/serve/dev/rlhf/api_router.py, ``mode`` defaults to abort).
3. Before weights change in place an acknowledged pause is made real. If nothing was paused, nothing
   is made real: the trainer asked for that.
4. A pause that fails anywhere is undone everywhere it may have landed, unanswered calls included:
   a resume of a replica that runs is 200 and does nothing.
5. A failed publication takes the pause back, acknowledged or real, because TRL dies between pause
   and resume without resuming (TRL 1.16, async_grpo_trainer.py, no ``finally``). The same holds for
   the trainer's death and for the daemon's own stop: all call ``abandon``.
6. After a resume the fleet counts as running, whoever failed it. A replica that may be left paused
   has to rejoin, and its catch-up resumes it.
7. A fleet that was put to sleep stands still in its own way: ``/is_paused`` says so too, and a
   resume would set an engine going whose weights are not there (vLLM 0.27.1, v1/engine/core.py,
   ``sleep``). Nobody resumes one, and who joins is sent to sleep as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

from broadcast.answer import Answer
from routing.ids import ReplicaId

PAUSED = Answer(200, b'{"status":"paused"}', "application/json")
RESUMED = Answer(200, b'{"status":"resumed"}', "application/json")
"""As vLLM 0.27.1 answers, entrypoints/serve/dev/rlhf/api_router.py."""
RESUME = "/resume"


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Answer the trainer; no replica hears of it."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Broadcast:
    """POST ``target`` to every replica, then report to ``pause_done`` or ``resume_done``."""

    target: str


def _target(path: str, query: bytes) -> str:
    # latin-1 keeps every byte as it came, whatever the client put there.
    return f"{path}?{query.decode('latin-1')}" if query else path


def _asks_only_to_keep(query: bytes) -> bool:
    """``mode=keep`` and no other parameter (``clear_cache``, ``wait_for_inflight_requests``)."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return bool(pairs) and all(pair == ("mode", "keep") for pair in pairs)


class Pause:
    """One fleet's pause. Calls to it and the broadcasts they ask for must not overlap."""

    def __init__(self, mode: Literal["lazy", "eager"] = "lazy") -> None:
        self.mode = mode
        self.real = False
        """The replicas stand still, as far as is known."""
        self.elided = 0
        """Pauses that ended without having reached a replica."""
        self.asleep: str | None = None
        """Target of the ``/sleep`` that the fleet has not woken up from."""
        self._query: bytes | None = None

    def __repr__(self) -> str:
        return f"<Pause {self.mode} paused {self.paused} real {self.real}>"

    @property
    def paused(self) -> bool:
        """What ``/is_paused`` and the status answer."""
        return self._query is not None

    @property
    def query(self) -> str | None:
        """Of the pause that the trainer is told of; None if there is none."""
        return None if self._query is None else self._query.decode("latin-1")

    @property
    def target(self) -> str | None:
        """What a joining replica is to be sent so that it stands still too; None if it may run."""
        if self.asleep is not None:
            return self.asleep
        return _target("/pause", self._query) if self.real and self._query is not None else None

    def on_pause(self, query: bytes) -> Acknowledge | Broadcast:
        """The trainer's ``/pause``, with its raw query string."""
        if self.mode == "lazy" and not self.real and _asks_only_to_keep(query):
            self._query = query
            return Acknowledge(PAUSED)
        return Broadcast(_target("/pause", query))

    def make_real(self) -> Broadcast | None:
        """Before weights change in place. None: nothing to do. Report to ``pause_done``."""
        if self.real or self._query is None:
            return None
        return Broadcast(_target("/pause", self._query))

    def pause_done(
        self,
        sent: Broadcast,
        paused: Collection[ReplicaId],
        failed: Collection[ReplicaId] = (),
        unknown: Collection[ReplicaId] = (),
    ) -> tuple[ReplicaId, ...]:
        """The replicas to resume before the error goes out; whether the pause holds is ``real``.

        ``paused`` answered 200, ``failed`` answered something else, ``unknown`` did not answer and
        may be paused. Replicas that left rotation meanwhile belong in none of them; a pause that
        reached nobody does not hold. A pause that was acknowledged before stays acknowledged when
        making it real fails.
        """
        if paused and not failed and not unknown:
            self.real = True
            self._query = sent.target.partition("?")[2].encode("latin-1")
            return ()
        if self.real:
            # The pause before this one is undone with it, on those that refused this one too.
            self.real = False
            self._query = None
            return (*paused, *failed, *unknown)
        return (*paused, *unknown)

    def found(self, *, real: bool, query: str = "mode=keep&clear_cache=false") -> None:
        """A daemon before this one told the trainer of a pause, and the trainer will resume."""
        self.real = real
        self._query = query.encode("latin-1")

    def on_resume(self, query: bytes = b"") -> Acknowledge | Broadcast:
        """The trainer's ``/resume``."""
        if self.mode == "lazy" and not self.real:
            self._elide()
            return Acknowledge(RESUMED)
        return Broadcast(_target(RESUME, query))

    def resume_done(
        self, failed: Collection[ReplicaId] = (), unknown: Collection[ReplicaId] = ()
    ) -> tuple[ReplicaId, ...]:
        """The replicas that may be left paused and must rejoin; the answer has to name them."""
        self.real = False
        self._query = None
        return (*failed, *unknown)

    def abandon(self) -> Broadcast | None:
        """Nobody will resume. What to send, if replicas stand still; report to ``resume_done``."""
        if self.real:
            return Broadcast(RESUME)
        self._elide()
        return None

    def _elide(self) -> None:
        self.elided += self._query is not None
        self._query = None

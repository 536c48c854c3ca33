"""A bucket mount that lags: what one reader sees of a folder that another machine writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


class LaggingFolder:
    """Reads below ``source`` show an entry ``lag_s`` after it was made, as hf-mount does.

    A look that finds nothing is remembered for ``negative_ttl_s``, so that a reader who looks
    too early waits longer (hf-mount v0.9.2, src/virtual_fs/mod.rs, NEG_CACHE_TTL: 30 s there,
    1 s since PR #226). With ``restarting`` each further look in that time starts it anew. Each
    mount has its own memory: one LaggingFolder per replica. Paths outside ``source`` are read
    as they are. ``clock`` is compared with file times, so it must be like ``time.time``.
    """

    def __init__(
        self,
        source: Path | str,
        lag_s: float,
        negative_ttl_s: float = 1.0,
        *,
        restarting: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.source = Path(source)
        self.lag_s = lag_s
        self.negative_ttl_s = negative_ttl_s
        self.restarting = restarting
        self.clock = clock
        self._missed: dict[Path, float] = {}
        self._seen: set[Path] = set()

    def __repr__(self) -> str:
        return f"<LaggingFolder {self.source}: {self.lag_s} s, {len(self._missed)} misses kept>"

    def read(self, path: str) -> bytes:
        """The bytes of one file; FileNotFoundError if this mount does not show it (yet)."""
        file = Path(path)
        if file.is_relative_to(self.source):
            self._look(file)
        return file.read_bytes()

    def _look(self, file: Path) -> None:
        """Raise unless the mount shows both the file and the directory it is in.

        Directories further up do not count: their change times move with every new neighbour,
        and a mount keeps showing a directory it has once listed.
        """
        now = self.clock()
        for place in (file.parent, file) if file.parent != self.source else (file,):
            missed_at = self._missed.get(place)
            if missed_at is not None and now - missed_at < self.negative_ttl_s:
                if self.restarting:
                    self._missed[place] = now
                raise FileNotFoundError(2, "No such file or directory", str(file))
            try:
                shown = place in self._seen or now - place.lstat().st_ctime >= self.lag_s
            except OSError:
                shown = False
            if not shown:
                self._remember(place, now)
                raise FileNotFoundError(2, "No such file or directory", str(file))
            if place == file.parent:
                self._seen.add(place)  # one entry per adapter directory of a run

    def _remember(self, place: Path, now: float) -> None:
        # Bounded: only misses that still count are kept.
        self._missed = {p: at for p, at in self._missed.items() if now - at < self.negative_ttl_s}
        self._missed[place] = now

"""The trace file: one line for each routed generation, one for each event of the fleet.

Rules (the contract's section 5 has the fields):

- Off the hot path: the event loop appends to a queue; a thread of its own makes lines, compresses
  and writes. A queue that is full drops lines, which are counted and told.
- Whole lines or none: what a full disk cut short is taken back from the file.
- One writer a file, by ``flock``. A recording that is there already is kept under another name: ids
  and times begin anew with each.
- No text and no token of a prompt: ``hash_ids`` number chained hashes in order of first sight.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from proxy.metrics import Metrics
from proxy.record import RequestRecord
from proxy.settings import SettingsError
from proxy.version import version
from routing.blocks import TEXT_BYTES_PER_TOKEN, path
from routing.ids import BlockHash

log = logging.getLogger("rollmux")

FORMAT = 1
QUEUE_BYTES = 64 << 20
"""Bound of what waits for the thread, by the sizes below: 8 s of 1,000 rollouts a second with
4,000-token prompts, which no disk we know falls behind."""
HASH_BYTES = 60  # one hash of 16 bytes and its place in a list
TOKEN_BYTES = 36  # one int and its place in a list
LINE_BYTES = 500  # the rest of a record
LINGER_S = 0.2
"""Lines wait so long for others: fewer wake-ups, and zstd does better on more."""
MAX_PATH_BLOCKS = 8192
"""As the policy ``prefix``: 131,072 tokens at 16 a block."""
ZSTD_LEVEL = 6
"""Measured with one request of 4,000 tokens a frame, its ids all new: 2.2 kB become 420 bytes in
0.1 ms of the thread."""


@dataclass(frozen=True, slots=True)
class _Request:
    record: RequestRecord
    block_tokens: int


class HashIds:
    """Small integers for chained hashes, in order of first sight. Bounded: oldest out first.

    A block is never younger than the one before it, so what is known of a chain is a beginning of
    it, and a chain that went out gets new numbers from there on. About 150 bytes a block.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._ids: OrderedDict[BlockHash, int] = OrderedDict()  # oldest first
        self._next = 0

    def __len__(self) -> int:
        return len(self._ids)

    def number(self, hashes: Sequence[BlockHash]) -> list[int]:
        """One id for each hash of a chain, which begins at its root."""
        ids, found = self._ids, []
        for block in hashes:
            number = ids.get(block)
            if number is None:
                number = ids[block] = self._next
                self._next += 1
            found.append(number)
        for block in reversed(hashes):
            ids.move_to_end(block)
        while len(ids) > self._max_blocks:
            ids.popitem(last=False)
        return found


class Recorder:
    """One trace file. The calls are those of the event loop, but for ``_write_all`` and below."""

    def __init__(
        self,
        file: Path,
        *,
        now_s: Callable[[], float],
        router: str,
        max_tracked_blocks: int,
        metrics: Metrics,
    ) -> None:
        """Open the file and start the thread.

        :raises SettingsError: another daemon writes it, it cannot be written, or zstd is missing.
        """
        self.block_tokens = 16
        """The router's; kept up to date by the daemon."""
        self._file = file
        self._now_s = now_s
        self._started_s = now_s()
        self._metrics = metrics
        self._max_blocks = max_tracked_blocks
        self._ids = HashIds(max_tracked_blocks)
        self._pack = _zstd() if file.name.endswith(".zst") else None
        self._fd = _open(file)
        self._written_bytes = 0
        self._broken = ""
        self._queue: deque[tuple[_Request | dict[str, Any], int]] = deque()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._told_dropped = False
        # Seconds since 1970, so that a trace can be laid beside the logs of a run.
        header = {
            "rollmux_trace": FORMAT,
            "version": version(),
            "router": router,
            "started_s": round(time.time(), 3),
        }
        self._put(header, LINE_BYTES)
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    # On the event loop

    def on_record(self, record: RequestRecord) -> None:
        """One generation has ended. What no replica was chosen for leaves no line."""
        if not record.decision:
            return
        if record.path is not None:
            size = HASH_BYTES * len(record.path.blocks)
            if not isinstance(record.prompt, bytes):
                record.prompt = range(len(record.prompt))  # its length is all that is needed
        elif isinstance(record.prompt, bytes):
            size = len(record.prompt)
        else:
            size = TOKEN_BYTES * len(record.prompt)
        self._put(_Request(record, self.block_tokens), LINE_BYTES + size)

    def on_event(self, event: str, **fields: object) -> None:
        """``publish``, ``unload``, ``pause`` or ``resume`` has happened."""
        self._put({"event": event, "timestamp": self._ms(self._now_s()), **fields}, LINE_BYTES)

    def close(self, timeout_s: float) -> None:
        """Write what is queued and let the file go. Waits no longer than that for a slow disk."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("%s: the end of the trace is lost: the disk is too slow", self._file)

    def _put(self, item: _Request | dict[str, Any], size: int) -> None:
        with self._lock:
            fits = self._queued_bytes + size <= QUEUE_BYTES
            if fits:
                self._queue.append((item, size))
                self._queued_bytes += size
        if fits:
            self._wake.set()
        else:
            self._dropped(1, "writing does not keep up")

    # On the thread

    def _write_all(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._stopping.wait(LINGER_S)
                last = self._stopping.is_set()
                self._wake.clear()
                self._write_batch()
                if last:
                    return
        finally:
            os.close(self._fd)  # which gives the lock back, too

    def _write_batch(self) -> None:
        with self._lock:
            batch, self._queue = self._queue, deque()
        if not batch:
            return
        # Still counted until they are written: else as much again could queue up meanwhile.
        lines = b"".join(self._line(item) for item, _ in batch)
        try:
            self._write(lines if self._pack is None else self._pack(lines))
        except OSError as exc:
            self._dropped(len(batch), exc.strerror or str(exc))
        else:
            self._metrics.trace_lines.labels("written").inc(len(batch))
        with self._lock:
            self._queued_bytes -= sum(size for _, size in batch)

    def _write(self, data: bytes) -> None:
        """All of it or nothing."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._written_bytes)
                os.lseek(self._fd, self._written_bytes, os.SEEK_SET)
            raise
        self._written_bytes += len(data)

    def _line(self, item: _Request | dict[str, Any]) -> bytes:
        data = item if isinstance(item, dict) else self._request(item.record, item.block_tokens)
        return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)

    def _request(self, record: RequestRecord, block_tokens: int) -> dict[str, Any]:
        prompt, trail = record.prompt, record.path
        if trail is None:
            limit = min(MAX_PATH_BLOCKS, self._max_blocks)
            trail = path(record.model, prompt, block_tokens, limit)
        is_text = isinstance(prompt, bytes)
        width = block_tokens * TEXT_BYTES_PER_TOKEN if is_text else block_tokens
        hashes = trail.blocks
        if trail.end is not None and len(prompt) % width:
            hashes = [*hashes, trail.end]  # the block that is not whole has a number too
        estimate = -(-len(prompt) // TEXT_BYTES_PER_TOKEN)
        return {
            "timestamp": self._ms(record.started_s),
            "input_length": (record.prompt_tokens or estimate) if is_text else len(prompt),
            "output_length": record.output_tokens,
            "hash_ids": self._ids.number(hashes),
            "block_size": block_tokens,
            "model": record.model,
            "replica": record.replica,
            "decision": record.decision,
            "ttft_ms": (
                round((record.first_piece_s - record.started_s) * 1e3, 1)
                if record.first_piece_s
                else None
            ),
            "duration_ms": round((record.ended_s - record.started_s) * 1e3, 1),
            "status": record.status,
            "route": record.route,
            **({"n": record.weight} if record.weight > 1 else {}),
        }

    def _ms(self, at_s: float) -> int:
        return max(0, round((at_s - self._started_s) * 1e3))

    def _dropped(self, lines: int, why: str) -> None:
        """On either side. Told once: the metric has the rest."""
        self._metrics.trace_lines.labels("dropped").inc(lines)
        if not self._told_dropped:
            self._told_dropped = True
            log.error(
                "the trace %s lacks lines from here on: %s; rollmux_trace_lines_total counts them",
                self._file,
                why,
            )


def _zstd() -> Callable[[bytes], bytes]:
    """Makes a frame of its own of each batch: what is written can be read, however we end, and a
    batch that was taken back leaves no frame open."""
    try:
        import zstandard
    except ImportError:
        raise SettingsError(
            "--record: a name that ends in .zst needs the package zstandard; install "
            "rollmux[zstd], or leave .zst away"
        ) from None
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress


def _open(file: Path) -> int:
    """The file, empty and ours alone; what was there is kept under another name."""
    try:
        while True:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours = os.fstat(fd)
                if not stat.S_ISREG(ours.st_mode):
                    raise SettingsError(f"--record: {file} is no file; give the name of one")
                is_there = file.exists() and os.path.samestat(file.stat(), ours)
                if is_there and ours.st_size == 0:
                    return fd
                if is_there:  # else another daemon has just put it aside
                    kept = _free_name(file)
                    os.rename(file, kept)
                    log.info("the trace that was in %s is kept as %s", file, kept)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    except BlockingIOError:
        raise SettingsError(
            f"--record: another daemon writes {file}; give each a file of its own"
        ) from None
    except OSError as exc:
        raise SettingsError(f"--record: cannot write {file}: {exc.strerror}") from exc


def _free_name(file: Path) -> Path:
    """``trace.1.jsonl`` for ``trace.jsonl``: what stands after the first dot stays."""
    stem, dot, ending = file.name.partition(".")
    number = 1
    while (free := file.with_name(f"{stem}.{number}{dot}{ending}")).exists():
        number += 1
    return free

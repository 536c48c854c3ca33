"""A real FUSE mount that shows a folder as another machine's bucket mount would: late.

    with lagging_mount(folder, lag_s=2.5, negative_ttl_s=1.0) as mount:
        with replica_running(parts, log, before=seen_at(mount, folder)) as (url, process): ...

A new entry appears `lag_s` after it was made. A look that finds nothing is remembered for
`negative_ttl_s`, as hf-mount does (v0.9.2, src/virtual_fs/mod.rs, NEG_CACHE_TTL: 30 s; 1 s since
PR #226). What has been shown stays until it is deleted, which shows at once. Read-only; one mount
for each replica, since each has its own memory. Needs root and /dev/fuse: see `missing_for_mounts`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 20.0
TIMES = ("st_atime", "st_ctime", "st_mtime")
PLAIN = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
# In a mount namespace of its own: trainer and daemon write to a path, the replica reads it late.
SEE = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


def missing_for_mounts() -> str:
    """What this machine lacks, for a skip; empty if it can mount."""
    if os.geteuid() != 0:
        return "mounting needs root"
    return "" if Path("/dev/fuse").exists() else "there is no /dev/fuse"


def seen_at(mount: Path, source: Path) -> list[str | Path]:
    """In front of a command line: that process, and no other, sees `mount` where `source` is."""
    shell = ["sh", "-c", SEE, "sh", mount, source]
    return ["unshare", "--mount", "--propagation", "private", *shell]


@contextlib.contextmanager
def lagging_mount(source: Path, lag_s: float, negative_ttl_s: float) -> Iterator[Path]:
    """The mount point, a new directory; gone, and its process too, at the end."""
    from tests.e2e import environment  # not in the child: it has only this file
    from tests.e2e.processes import environment_with, running, wait_until

    env = environment.default_dir()
    module, library = environment.fuse_of(env)
    with tempfile.TemporaryDirectory(prefix="rollmux-mount-") as directory:
        mount = Path(directory, "mount")
        mount.mkdir()
        command = [environment.python_of(env), __file__, source, mount, lag_s, negative_ttl_s]
        variables = environment_with(PYTHONPATH=str(module), FUSE_LIBRARY_PATH=str(library))
        log = Path(directory, "log")
        with running("lagging mount", [str(c) for c in command], variables, log) as process:
            try:
                wait_until(mount.is_mount, process, START_S, "mount", 0.05)
                yield mount
            finally:
                # Lazy: a replica that has not quite gone may still look at it.
                subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


def main() -> None:
    import mfusepy  # only the child has it

    source, mount, lag_s, negative_ttl_s = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:5])

    class Late(mfusepy.Operations):
        use_ns = True

        def __init__(self) -> None:
            self.shown: set[tuple[str, int]] = set()  # an adapter has four files
            self.missed_s: dict[str, float] = {}  # by path; a test has a few hundred

        def shows(self, path: str) -> bool:
            place = source + path
            try:
                stat = os.lstat(place)
            except OSError:
                return False
            # A directory changes with each new entry, and must not be hidden again for that.
            if (path, stat.st_ino) not in self.shown:
                if path != "/" and time.time() - stat.st_ctime < lag_s:
                    return False
                self.shown.add((path, stat.st_ino))
            return True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            recent = time.monotonic() - self.missed_s.get(path, -negative_ttl_s) < negative_ttl_s
            if recent or not self.shows(path):
                if not recent:
                    self.missed_s[path] = time.monotonic()
                raise mfusepy.FuseOSError(errno.ENOENT)
            stat = os.lstat(source + path)
            plain = {name: getattr(stat, name) for name in PLAIN}
            return plain | {name: getattr(stat, f"{name}_ns") for name in TIMES}

        def readdir(self, path: str, fh: int) -> list[str]:
            names = os.listdir(source + path)
            return [".", "..", *(n for n in names if self.shows(f"{path.rstrip('/')}/{n}"))]

        def open(self, path: str, flags: int) -> int:
            return os.open(source + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

    # One thread: two looks at one path must not both be the first.
    mfusepy.FUSE(Late(), mount, foreground=True, nothreads=True, ro=True)


if __name__ == "__main__":
    main()

"""Builds and runs images with buildah, in a store of its own that is gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = {"index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries"}
"""Keys of pip's configuration that mean the same inside a build."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def pip_settings() -> dict[str, str]:
    """What pip is told on this machine, without what only exists on its disk."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].removeprefix("default-")
        words = [word for word in value.strip("'\"").split() if not word.startswith("file:")]
        if name in PORTABLE and words:
            settings[name] = " ".join(words)
    return settings


def pip_conf() -> str:
    """The same as a file for a build, which finds this machine's certificates in its base."""
    settings = {"cert": CERTIFICATES} | pip_settings()
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())


@dataclass(frozen=True, slots=True)
class Store:
    """buildah with a storage folder of its own."""

    folder: Path

    def command(self, *words: str | Path) -> list[str]:
        places = ["--root", self.folder / "storage", "--runroot", self.folder / "run"]
        return [str(w) for w in ("buildah", *places, "--storage-driver", "vfs", *words)]

    def run(self, *words: str | Path, timeout_s: float = 600) -> str:
        """Its output; AssertionError with all it wrote if it fails."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert done.returncode == 0, f"buildah {words[0]}: {(done.stdout + done.stderr)[-4000:]}"
        return done.stdout.strip()

    def make_base(self, root_tar: Path, name: str) -> None:
        scratch = self.run("from", "scratch")
        self.run("add", scratch, root_tar, "/")
        if Path(CERTIFICATES).exists():  # the machine may trust more than Debian does
            self.run("add", scratch, CERTIFICATES, CERTIFICATES)
        self.run("commit", "--rm", scratch, name)

    def build(self, name: str, base: str) -> None:
        secret = self.folder / "pip.conf"
        secret.write_text(pip_conf())
        self.run(
            *("bud", "--isolation", "chroot", "--network", "host", "--format", "docker"),
            *("--secret", f"id=pip.conf,src={secret}", "--build-arg", f"BASE_IMAGE={base}"),
            *("--tag", name, ROOT),
        )

    def config(self, image: str) -> dict[str, Any]:
        """What the image says about how it wants to be run."""
        inspected = json.loads(self.run("inspect", "--type", "image", image))
        config: dict[str, Any] = inspected["Docker"]["config"]
        return config

    def container(self, image: str) -> Container:
        return Container(self, self.run("from", image), self.config(image))


@dataclass(frozen=True, slots=True)
class Container:
    """A working container. Its commands see the host's network, as two containers of a pod do."""

    store: Store
    name: str
    config: dict[str, Any]

    def root(self) -> Path:
        """Its files, mounted."""
        return Path(self.store.run("mount", self.name))

    def set_environment(self, **variables: str) -> None:
        for key, value in variables.items():
            self.store.run("config", "--env", f"{key}={value}", self.name)

    def command(self, *words: str, volume: str = "") -> list[str]:
        volumes = ["--volume", volume] if volume else []
        run = ("run", "--isolation", "chroot", *volumes, self.name, "--")
        return self.store.command(*run, *words)

    def check(self, *words: str) -> int:
        """Exit code of a command inside."""
        return subprocess.run(self.command(*words), capture_output=True, check=False).returncode

    def start(self, log: Path, volume: str) -> Running:
        """The entry point with its CMD. ``volume`` is ``HERE:THERE`` or ``HERE:THERE:ro``."""
        words = [*self.config["Entrypoint"], *self.config["Cmd"]]
        command = self.command(*words, volume=volume)
        with log.open("wb") as out:
            return Running(subprocess.Popen(command, stdout=out, stderr=out), log)


@dataclass(frozen=True, slots=True)
class Running:
    """A started container, as its runtime sees it."""

    buildah: subprocess.Popen[bytes]
    log: Path

    def first_process(self) -> int:
        """Pid, on the host, of the process that would be the container's first."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid = self.buildah.pid
            while children := _children(pid):
                pid = children[0]
                if not _words(pid)[0].startswith(b"buildah"):
                    return pid
            assert self.buildah.poll() is None, self.text()
            time.sleep(0.05)
        raise AssertionError(f"no process in the container: {self.text()}")

    def user_ids(self) -> set[int]:
        """Real, effective, saved and file system user of the first process."""
        status = Path(f"/proc/{self.first_process()}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("Uid:"))
        return {int(uid) for uid in line.split()[1:]}

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def wait(self, timeout_s: float) -> int:
        return self.buildah.wait(timeout_s)

    def end(self) -> None:
        """Whatever is left of it."""
        if self.buildah.poll() is None:
            os.kill(self.first_process(), signal.SIGKILL)
            self.buildah.wait(30)


def _children(pid: int) -> list[int]:
    # Of all its threads: Go starts a child from any of them.
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return []


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b"buildah"]


def tree_bytes(root: Path) -> int:
    """What the files below take; one with several names counts once, nothing is followed."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root):
        for file in files:
            stat = (Path(folder) / file).lstat()
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())

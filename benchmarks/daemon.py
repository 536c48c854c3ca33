"""The real daemon as a child process, for demo and measurements."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx

HERE = str(Path(__file__).resolve().parent.parent)
START_S = 30.0  # for the daemon to be up and the replicas ready


class DaemonGone(Exception):
    """It did not come up, or it ended; the text has its last lines."""

    def __init__(self, what: str, log: Path) -> None:
        lines = log.read_text(errors="replace").strip().splitlines()[-5:]
        super().__init__("\n  ".join([f"the daemon {what}; its last lines:", *lines]))


def connect(url: str) -> httpx.AsyncClient:
    """A client for loopback; a reply may take as long as two syncs do."""
    # verify: nothing is encrypted here, and loading certificates takes longer than a rollout.
    return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=120)


@contextlib.asynccontextmanager
async def daemon(
    replicas: Sequence[str],
    log: Path,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """`rollmux serve` in front of these URLs, on a free port, its output in ``log``.

    ``environ`` is all that it gets of settings by environment.

    Yields its URL once all replicas are ready, and ends it afterwards. Raises DaemonGone.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "proxy", "serve", "--fd", str(listener.fileno())]
    for replica in replicas:
        command += ["--replica", replica]
    command += ["--drain-s", "2", *options]
    clean = environment(environ or {})
    with listener, log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, pass_fds=(listener.fileno(),), env=clean
        )
        listener.close()
        try:
            await _until_healthy(url, child, log)
            yield url
        finally:
            await end(child)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For a child: ours without what is set for a real fleet, and with ``environ``."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLMUX_", "PROXY_"))}
    clean.pop("UPSTREAM_URLS", None)
    clean["PYTHONPATH"] = os.pathsep.join(p for p in (HERE, clean.get("PYTHONPATH")) if p)
    return {**clean, **environ}


async def end(child: asyncio.subprocess.Process) -> None:
    """SIGTERM, ten seconds, then SIGKILL; gone on return."""
    if child.returncode is None:
        child.terminate()
    try:
        async with asyncio.timeout(10):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


async def _until_healthy(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            if child.returncode is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise DaemonGone("did not come up", log)

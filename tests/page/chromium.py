"""Headless Chromium for tests, driven over its debugging pipe: no port, no driver program.

A message is JSON ended by a zero byte, on descriptors 3 (to the browser) and 4 (from it); Chromium,
``content/browser/devtools/devtools_pipe_handler.cc``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE_S = 90.0
"""Of whatever is waited for: a browser starts in 1 s, and in 20 s on a machine with much to do."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--no-proxy-server", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
ON_3_AND_4 = 'from=$1 to=$2; shift 2; exec "$@" 3<&"$from" 4>&"$to"'


class Chromium:
    """One browser with one page; an async context manager. ``profile`` is its own directory."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        """Everything the page was said to do, in order."""

    async def __aenter__(self) -> Self:
        assert CHROMIUM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Above 9, so that none of them is 3 or 4 already.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        self._process = await asyncio.create_subprocess_exec(
            "bash", "-c", ON_3_AND_4, "bash", *map(str, theirs), CHROMIUM, *FLAGS,
            f"--user-data-dir={self._profile}", "about:blank",
            pass_fds=theirs, start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        for fd in theirs:
            os.close(fd)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
        self._input, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", 0)
        )
        self._output, _ = await loop.connect_write_pipe(
            asyncio.Protocol, os.fdopen(ours_out, "wb", 0)
        )
        self._reading = loop.create_task(self._read(reader), name="chromium")
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._session = ""
        with contextlib.suppress(TimeoutError, EOFError):
            async with asyncio.timeout(10):
                await self.send("Browser.close")
                await self._process.wait()
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        self._output.close()
        self._input.close()
        await asyncio.wait((self._reading,))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result. Raises AssertionError for an error."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._output.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(DEADLINE_S):
            found = await answer
        assert "error" not in found, f"{method}: {found['error']}"
        result: dict[str, Any] = found["result"]
        return result

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._answers.pop(message["id"]).set_result(message)
                else:
                    self.events.append(message)
        except asyncio.IncompleteReadError:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(EOFError("Chromium has ended"))

    def seen(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]

    async def open(self, url: str) -> None:
        """Go there, and wait until the document is there and its script has run."""
        loaded = len(self.seen("Page.loadEventFired"))
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(DEADLINE_S):
            while len(self.seen("Page.loadEventFired")) == loaded:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def size(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Another viewport, in CSS pixels, with a colour scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def value(self, script: str) -> Any:
        """What a script's last expression is, as JSON has it."""
        found = await self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until a script's value is a true one, and return that."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := await self.value(script)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return found

    async def text(self, selector: str = "body") -> str:
        """The text that a reader sees there."""
        found = await self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(found, str)
        return found

    async def screenshot(self, path: Path) -> bytes:
        """The whole page as a PNG file."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        data = base64.b64decode(shot["data"])
        await asyncio.to_thread(path.write_bytes, data)
        return data

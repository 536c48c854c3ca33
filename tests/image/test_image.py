"""The container image: built for real, run as its configuration says, beside simulated replicas."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.bucket import LaggingFolder
from benchmarks.daemon import connect
from benchmarks.demo import REPLICA, Tally, Trainer
from benchmarks.replica import SimulatedReplica
from benchmarks.trace import read
from tests.image import base
from tests.image.containers import ROOT, Container, Running, Store, tree_bytes

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]

BASE, IMAGE = "localhost/rollmux-test-base", "localhost/rollmux-test"
MB = 1_000_000
UP_S = 120.0
"""For anything to come up on a busy machine."""
STOP_S = 25.0
"""From SIGTERM to the end, whatever is in flight (the drain is 20 s)."""
ROLLOUTS, SYNCS, WORKERS = 300, 2, 24
RECORD = "trace.jsonl.zst"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A store with the base and the image in it."""
    missing = [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs {', '.join(missing) or 'root'}")
    with tempfile.TemporaryDirectory(prefix="rollmux-image-") as folder:
        made = Store(Path(folder))
        made.make_base(base.root_tar(), BASE)
        made.build(IMAGE, BASE)
        try:
            yield made
        finally:
            made.run("umount", "--all")
            made.run("rm", "--all")


@dataclass(frozen=True, slots=True)
class Served:
    """The container's daemon before two replicas, all of them ready."""

    container: Container
    running: Running
    client: httpx.AsyncClient
    replicas: list[SimulatedReplica]
    bucket: Path


@asynccontextmanager
async def served(store: Store, *, push: bool = False) -> AsyncIterator[Served]:
    """With ``push`` the container sees the trainer's folder read-only, and the replicas not at all.

    That is how the manifests run it.
    """
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollmux-image-")))
        bucket = _open_folder(scratch / "bucket")
        sees = scratch / "pushed" if push else bucket
        key = {"push_key": "of-this-test", "push_root": sees} if push else {}
        replicas = [
            await stack.enter_async_context(
                SimulatedReplica(REPLICA, folder=LaggingFolder(sees, 0.3, 0.3), **key)
            )
            for _ in range(2)
        ]
        port = _free_port()
        environ = {
            "ROLLMUX_PORT": str(port),
            "ROLLMUX_REPLICAS": ",".join(replica.url for replica in replicas),
            "ROLLMUX_PUSH_KEY": key.get("push_key", ""),
            **({} if push else {"ROLLMUX_RECORD": str(bucket / RECORD)}),
        }
        container = await asyncio.to_thread(store.container, IMAGE)
        await asyncio.to_thread(lambda: container.set_environment(**environ))
        volume = f"{bucket}:{bucket}:ro" if push else f"{bucket}:{bucket}"
        running = container.start(scratch / "log", volume)
        stack.callback(running.end)
        client = await stack.enter_async_context(connect(f"http://127.0.0.1:{port}"))
        await _until_healthy(client, running)
        yield Served(container, running, client, replicas, bucket)


def _open_folder(folder: Path) -> Path:
    """Of a bucket: the container's user writes its own copies of adapters there."""
    folder.parent.chmod(0o755)
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_healthy(client: httpx.AsyncClient, running: Running) -> None:
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            assert running.buildah.poll() is None, running.text()
        await asyncio.sleep(0.1)
    pytest.fail(f"not healthy in {UP_S} s: {running.text()}")


@pytest.mark.parametrize("push", [False, True], ids=["path", "push"])
async def test_serves_the_demos_traffic_as_nobody_in_particular(store, push):
    async with served(store, push=push) as here:
        assert 0 not in here.running.user_ids()
        health = here.container.config["Healthcheck"]["Test"]
        assert health[0] == "CMD"
        assert await asyncio.to_thread(here.container.check, *health[1:]) == 0

        tally = Tally(started_s=time.monotonic())
        trainer = Trainer(here.client, _open_folder(here.bucket / "run"), tally)
        await trainer.sync()
        async with asyncio.timeout(UP_S), asyncio.TaskGroup() as group:
            workers = [group.create_task(trainer.roll_out()) for _ in range(WORKERS)]
            while not tally.failures:
                await asyncio.sleep(0.05)
                if len(tally.syncs_s) > SYNCS and tally.rollouts >= ROLLOUTS:
                    break
                if tally.rollouts > ROLLOUTS * len(tally.syncs_s) // (SYNCS + 1):
                    await trainer.sync()
            for worker in workers:
                worker.cancel()
        assert tally.failures == []
        assert tally.wrong == 0
        assert len(tally.syncs_s) > SYNCS
        report = (await here.client.get("/proxy/status")).json()
        assert all(replica["routed"] for replica in report["replicas"])
        metrics = (await here.client.get("/metrics")).text
        pushed = re.findall(r"^rollmux_pushed_bytes_total\S* (\S+)", metrics, re.MULTILINE)
        assert (sum(map(float, pushed)) > 0) is push
        if not push:
            assert read(here.bucket / RECORD).requests


async def test_stops_in_time_with_work_in_flight_and_with_code_0(store):
    """One rollout that can end while it drains, and one that never will."""
    async with served(store) as here:
        pid = here.running.first_process()
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
        for replica in here.replicas:
            replica.faults.add("/v1/completions", hang=True, nth=1)
        async with asyncio.TaskGroup() as group:
            stuck = group.create_task(_code(here.client, body))
            await _until(lambda: any(r.calls("/v1/completions") for r in here.replicas))
            for replica in here.replicas:
                replica.faults.clear()
                replica.faults.add("/v1/completions", delay_s=1.0)
            ending = group.create_task(_code(here.client, body))
            await _until(lambda: sum(len(r.calls("/v1/completions")) for r in here.replicas) == 2)
            began = time.monotonic()
            os.kill(pid, signal.Signals[here.container.config["StopSignal"]])
            code = await asyncio.to_thread(here.running.wait, 60)
            took_s = time.monotonic() - began
        assert code == 0, here.running.text()
        assert took_s < STOP_S
        assert ending.result() == 200
        assert stuck.result() != 200
        health = here.container.config["Healthcheck"]["Test"][1:]
        assert await asyncio.to_thread(here.container.check, *health) == 1


async def _code(client: httpx.AsyncClient, body: object) -> int | None:
    try:
        return (await client.post("/v1/completions", json=body)).status_code
    except httpx.TransportError:
        return None


async def _until(holds) -> None:
    async with asyncio.timeout(UP_S):
        while not holds():  # noqa: ASYNC110 - a replica's log has no event to wait for
            await asyncio.sleep(0.05)


def test_is_small_and_has_no_build_tools(store):
    plain, image = store.container(BASE).root(), store.container(IMAGE).root()
    whole, added = tree_bytes(image), tree_bytes(image) - tree_bytes(plain)
    # Shown by `pytest -s`: the figure that docs/deploy.md gives.
    print(f"image {whole / MB:.0f} MB, of it {added / MB:.0f} MB over the base")  # noqa: T201
    assert added < 60 * MB
    assert whole < 200 * MB
    tools = [
        image / f"{d}/{t}" for d in ("usr/bin", "opt/rollmux/bin") for t in ("cc", "gcc", "pip")
    ]
    assert [tool for tool in tools if tool.exists()] == []
    assert not (image / "src").exists()
    assert not (image / "etc/pip.conf").exists()


def test_config_is_what_an_orchestrator_relies_on(store):
    config = store.config(IMAGE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert config["Labels"]["org.opencontainers.image.version"] == project["version"]
    assert config["Entrypoint"] == ["rollmux"]
    assert config["Cmd"] == ["serve"]
    # A number: Kubernetes cannot tell that a name is not root.
    assert int(config["User"].partition(":")[0]) > 0


def test_has_the_replicas_push_endpoint_at_a_fixed_place(store):
    file = store.container(IMAGE).root() / "opt/rollmux/replica/rollmux_push.py"
    assert file.read_bytes() == (ROOT / "deploy/replica/rollmux_push.py").read_bytes()

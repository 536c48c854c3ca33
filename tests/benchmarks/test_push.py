"""Adapters pushed to simulated replicas: what tests of the daemon rely on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from benchmarks.adapter import write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.replica import SimulatedReplica
from broadcast import adapter_dir

KEY = {"x-rollmux-push-key": "secret"}


class Pushed:
    """An adapter, and a client's way to bring it to a replica."""

    def __init__(self, client: httpx.AsyncClient, source: Path) -> None:
        self.client = client
        self.files = {p.name: p.read_bytes() for p in source.iterdir()}
        digest = adapter_dir.digest(source)
        self.name = f"{source.name}-{digest}"
        lines = [
            {"name": name, "bytes": len(data), "digest": blake3(data).hexdigest()}
            for name, data in self.files.items()
        ]
        self.manifest = {"digest": digest, "files": lines}

    async def push(self, replica: SimulatedReplica) -> str:
        url = f"{replica.url}/rollmux/push/{self.name}"
        answer = await self.client.post(url, json=self.manifest, headers=KEY)
        for name in answer.json().get("missing", ()):
            sent = await self.client.put(f"{url}/{name}", content=self.files[name], headers=KEY)
            assert sent.status_code == 204, sent.text
        answer = await self.client.post(url, json=self.manifest, headers=KEY)
        path: str = answer.json()["path"]
        return path

    async def load(self, replica: SimulatedReplica, path: str) -> int:
        body = {"lora_name": "v1", "lora_path": path}
        answer = await self.client.post(f"{replica.url}/v1/load_lora_adapter", json=body)
        return answer.status_code

    async def delete(self, replica: SimulatedReplica) -> int:
        url = f"{replica.url}/rollmux/push/{self.name}"
        return (await self.client.delete(url, headers=KEY)).status_code


@pytest.fixture
async def pushed(tmp_path: Path) -> AsyncIterator[Pushed]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield Pushed(client, write_adapter(tmp_path / "trainer" / "v1", layers=1))


def instances(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def exist(paths: list[str]) -> list[bool]:
    return [Path(path).exists() for path in paths]


async def about(client: httpx.AsyncClient, replica: SimulatedReplica) -> Any:
    return (await client.get(f"{replica.url}/rollmux/push", headers=KEY)).json()


async def test_pushed_adapter_is_loaded_and_stays_while_it_is_listed(
    pushed: Pushed, tmp_path: Path
) -> None:
    """Through no mount: the one that this replica has does not show the trainer's folder."""
    mount = LaggingFolder(tmp_path / "trainer", 3600.0)
    root = tmp_path / "push"
    async with SimulatedReplica(push_key="secret", push_root=root, folder=mount) as replica:
        assert await pushed.load(replica, str(tmp_path / "trainer" / "v1")) == 404
        path = await pushed.push(replica)
        assert await pushed.load(replica, path) == 200
        assert await pushed.delete(replica) == 409
        url = f"{replica.url}/v1/unload_lora_adapter"
        await pushed.client.post(url, json={"lora_name": "v1"})
        assert await pushed.delete(replica) == 204
        assert await pushed.load(replica, path) == 404
    assert instances(root) == set()


async def test_a_restart_is_another_instance_without_the_old_ones_files(
    pushed: Pushed, tmp_path: Path
) -> None:
    root = tmp_path / "push"
    async with (
        SimulatedReplica(push_key="secret", push_root=root) as replica,
        SimulatedReplica(push_key="secret", push_root=root) as neighbour,
    ):
        paths = [await pushed.push(r) for r in (replica, neighbour)]
        before = await about(pushed.client, replica)
        assert len(before["adapters"]) == 1
        await replica.kill()
        with pytest.raises(httpx.ConnectError):
            await about(pushed.client, replica)
        assert exist(paths) == [True, True]
        await replica.restart()
        after = await about(pushed.client, replica)
        assert after["instance"] != before["instance"]
        assert after["adapters"] == []
        assert exist(paths) == [False, True]
        assert len(instances(root)) == 2


async def test_work_on_files_goes_on_when_the_client_leaves(pushed: Pushed, tmp_path: Path) -> None:
    async with SimulatedReplica(push_key="secret", push_root=tmp_path / "push") as replica:
        assert replica._push is not None
        store = replica._push._push.store
        assert store is not None
        url = f"{replica.url}/rollmux/push/{pushed.name}"
        with store._lock:
            call = asyncio.ensure_future(pushed.client.post(url, json=pushed.manifest, headers=KEY))
            async with asyncio.timeout(30):
                while not replica.log:  # noqa: ASYNC110 - another object's state
                    await asyncio.sleep(0.001)
            call.cancel()
        async with asyncio.timeout(30):
            while not store._held:  # noqa: ASYNC110 - another object's state
                await asyncio.sleep(0.001)


async def test_without_a_key_there_is_no_such_path_and_no_folder(pushed: Pushed) -> None:
    async with SimulatedReplica() as replica:
        answer = await pushed.client.get(f"{replica.url}/rollmux/push", headers=KEY)
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
        assert "x-rollmux-push" not in answer.headers

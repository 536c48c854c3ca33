"""Adapters pushed to replicas that cannot see the trainer's directory, by a whole daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import proxy.publishing
import proxy.pushing
from benchmarks.adapter import write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.replica import SimulatedReplica
from proxy.settings import Secrets
from tests.proxy.conftest import Running, Start

KEY = "a-push-key"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


def adapter(root: Path, number: int, **shape: Any) -> str:
    return str(write_adapter(root / "trainer" / f"trl-policy-v{number}", number, **shape))


async def load(running: Running, number: int, path: str) -> Any:
    return await running.client.post(
        LOAD, json={"lora_name": f"trl-policy-v{number}", "lora_path": path}, timeout=60
    )


def paths_of(replica: SimulatedReplica) -> dict[str, str]:
    return {held.name: held.path for held in replica.names.values()}


def write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def names_in(folder: str | Path) -> list[str]:
    return sorted(os.listdir(folder))


@contextlib.asynccontextmanager
async def pushed_to(tmp_path: Path, count: int = 2) -> AsyncIterator[list[SimulatedReplica]]:
    """Replicas with the endpoint, which see nothing of the trainer's folder."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                SimulatedReplica(push_key=KEY, push_root=tmp_path / f"replica{i}")
            )
            for i in range(count)
        ]


@pytest.fixture
def pushing(start: Start, tmp_path: Path):
    """Starts a daemon that has the push key."""

    async def begin(urls: list[str], **settings: Any) -> Running:
        settings.setdefault("push_cache", str(tmp_path / "cache"))
        return await start(urls, secrets=Secrets(push_key=KEY), **settings)

    return begin


async def test_each_replica_loads_the_files_from_its_own_folder(pushing, tmp_path):
    async with pushed_to(tmp_path) as replicas:
        running = await pushing([r.url for r in replicas], adapter_transport="push")
        path = adapter(tmp_path, 1)
        answer = await load(running, 1, path)
        assert answer.status_code == 200, answer.text
        for i, replica in enumerate(replicas):
            listed = paths_of(replica)["trl-policy-v1"]
            assert listed.startswith(str(tmp_path / f"replica{i}"))
            assert names_in(listed) == names_in(path)
        # Nothing of ours lies in the trainer's folder.
        assert names_in(tmp_path / "trainer") == ["trl-policy-v1"]
        reply = await running.complete("trl-policy-v1", [1, 2, 3])
        assert reply.status_code == 200
        models = (await running.client.get("/v1/models")).json()["data"]
        assert models[1]["id"] == "trl-policy-v1"


def pushes(replica: SimulatedReplica) -> list[tuple[str, int]]:
    """Method of each, and how many components its path has below the endpoint."""
    found = [call for call in replica.log if call.path.startswith("/rollmux/push/")]
    return [(call.method, call.path.count("/") - 2) for call in found]


async def test_a_small_adapter_goes_in_one_call_and_a_large_one_file_by_file(
    pushing, tmp_path, monkeypatch
):
    async with pushed_to(tmp_path, 1) as (a,):
        running = await pushing([a.url], adapter_transport="push")
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        assert pushes(a) == [("PUT", 1)]
        # After its restart it has nothing, and gets it in one call again.
        await a.restart()
        await running.until(lambda: not running.daemon.replicas.fleet.routable())
        await running.until_ready(1)
        assert pushes(a) == [("PUT", 1)] * 2
        monkeypatch.setattr(proxy.pushing, "WHOLE_BYTES", 10)
        assert (await load(running, 2, adapter(tmp_path, 2))).status_code == 200
        assert pushes(a)[2:] == [("POST", 1), ("PUT", 2), ("PUT", 2), ("POST", 1)]


async def test_a_load_that_is_tried_again_does_not_send_the_files_again(pushing, tmp_path):
    async with pushed_to(tmp_path, 1) as (a,):
        running = await pushing([a.url], adapter_transport="push")
        a.faults.add(LOAD, reset=True, times=1)
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        assert pushes(a) == [("PUT", 1), ("POST", 1)]


async def test_an_adapter_that_is_not_taken_in_one_call_goes_file_by_file(pushing, tmp_path):
    """By an endpoint of before it, say. Where pushes are not required the shared path would do."""
    async with pushed_to(tmp_path, 1) as (a,):
        running = await pushing([a.url])
        a.faults.add("*", method="PUT", status=405, body=b"{}", times=1)
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        assert pushes(a) == [("PUT", 1), ("POST", 1), ("PUT", 2), ("PUT", 2), ("POST", 1)]


async def test_a_name_with_other_bytes_has_the_room_of_those_before_it(pushing, tmp_path):
    """Files are sent once the name is unloaded: what is listed is not taken away for them."""
    async with SimulatedReplica(push_key=KEY, push_root=tmp_path / "r", push_max_mb=1) as a:
        running = await pushing([a.url], adapter_transport="push")
        a.faults.add(UNLOAD, delay_s=0.3)
        for seed in (1, 2):
            path = write_adapter(tmp_path / f"trainer{seed}" / "trl-policy-v1", seed)
            write(path / "notes", bytes(600_000))
            assert (await load(running, 1, str(path))).status_code == 200
        assert pushes(a) == [("PUT", 1), ("PUT", 1), ("DELETE", 1)]


async def test_a_publication_that_breaks_off_sends_no_files_on(pushing, tmp_path, monkeypatch):
    sending = asyncio.Event()

    async def held(file: Path) -> AsyncIterator[bytes]:
        sending.set()
        await asyncio.Event().wait()
        yield b""

    async def broken(*_: Any, **__: Any) -> None:
        await sending.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr(proxy.pushing, "_pieces", held)
    monkeypatch.setattr(proxy.publishing, "publish", broken)
    async with pushed_to(tmp_path, 1) as (a,):
        running = await pushing([a.url], adapter_transport="push")
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 500
        assert [t.get_name() for t in asyncio.all_tasks() if "push " in t.get_name()] == []


async def test_a_replica_that_restarts_gets_what_the_trainer_has_deleted(pushing, tmp_path):
    async with pushed_to(tmp_path) as replicas:
        running = await pushing([r.url for r in replicas], adapter_transport="push", probe_s=0.2)
        for number in (1, 2):
            assert (await load(running, number, adapter(tmp_path, number))).status_code == 200
        shutil.rmtree(tmp_path / "trainer")
        before = paths_of(replicas[0])
        await replicas[0].restart()
        await running.until(lambda: len(running.daemon.replicas.fleet.routable()) == 1)
        await running.until_ready(2)
        after = paths_of(replicas[0])
        assert after.keys() == before.keys()
        assert set(after.values()).isdisjoint(before.values())  # the dead process's folder is gone


async def test_one_replica_on_push_and_one_on_a_mount_that_lags(pushing, tmp_path):
    folder = LaggingFolder(tmp_path, lag_s=1.0)
    async with pushed_to(tmp_path, 1) as (a,), SimulatedReplica(folder=folder) as b:
        running = await pushing([a.url, b.url], own_copies="auto")
        path = adapter(tmp_path, 1)
        assert (await load(running, 1, path)).status_code == 200
        assert str(tmp_path / "replica0") in paths_of(a)["trl-policy-v1"]
        assert paths_of(b)["trl-policy-v1"].startswith(str(tmp_path / "trainer" / ".rollmux"))
        assert len(a.calls(LOAD)) == 1


async def test_nothing_is_written_to_the_trainers_folder_while_a_replica_is_away(pushing, tmp_path):
    async with pushed_to(tmp_path) as (a, b):
        b.refuse()
        urls = [a.url, b.url]
        running = await pushing(urls, adapter_transport="push", own_copies="auto", ready=1)
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        assert names_in(tmp_path / "trainer") == ["trl-policy-v1"]
        await b.listen()
        await running.until_ready(2)
        assert list(paths_of(b)) == ["trl-policy-v1"]


async def test_a_cache_that_is_not_ours_is_not_used(pushing, tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    cache = tmp_path / "cache"
    async with pushed_to(tmp_path, 1) as (a,):
        running = await pushing([a.url], push_cache=str(cache))
        cache.symlink_to(tmp_path / "elsewhere")
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        assert names_in(tmp_path / "elsewhere") == []
        assert "give --push-cache" in caplog.text


async def test_without_the_endpoint_push_keeps_a_replica_out_and_says_what_to_do(
    pushing, tmp_path, caplog
):
    async with pushed_to(tmp_path, 1) as (a,), SimulatedReplica() as b:
        running = await pushing([a.url, b.url], adapter_transport="push", ready=1)
        await running.until(lambda: running.daemon.replicas.fleet.get("r1").error_code == "no_push")
        assert "--middleware rollmux_push.AdapterPush" in caplog.text


async def test_a_wrong_key_leaves_auto_on_the_shared_path_with_a_warning(start, tmp_path, caplog):
    async with pushed_to(tmp_path, 1) as (a,):
        running = await start([a.url], secrets=Secrets(push_key="another-key"))
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        assert "trainer" in paths_of(a)["trl-policy-v1"]
        assert "by the shared path" in caplog.text
        assert KEY not in caplog.text
        assert "another-key" not in caplog.text


async def test_files_leave_the_replicas_and_the_cache_once_their_name_is_unloaded(
    pushing, tmp_path
):
    async with pushed_to(tmp_path) as replicas:
        running = await pushing([r.url for r in replicas], retire_grace_s=0.1)
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        cache = tmp_path / "cache" / ".rollmux"
        kept = [Path(paths_of(r)["trl-policy-v1"]) for r in replicas]
        kept += [cache / name for name in names_in(cache)]
        assert len(kept) == 3
        assert all(path.is_dir() for path in kept)
        await running.client.post(UNLOAD, json={"lora_name": "trl-policy-v1"})
        await running.until(lambda: not any(path.exists() for path in kept))
        assert all(not r.names for r in replicas)


async def test_a_retired_name_is_served_though_the_trainer_deleted_its_files(pushing, tmp_path):
    async with pushed_to(tmp_path) as replicas:
        running = await pushing([r.url for r in replicas])
        assert (await load(running, 1, adapter(tmp_path, 1))).status_code == 200
        await running.client.post(UNLOAD, json={"lora_name": "trl-policy-v1"})
        shutil.rmtree(tmp_path / "trainer")
        await running.daemon.publishing.sweep_once()
        reply = await running.complete("trl-policy-v1", [1, 2, 3])
        assert reply.status_code == 200, reply.text


async def test_a_daemon_that_restarts_knows_pushed_adapters_by_their_digest(pushing, tmp_path):
    async with pushed_to(tmp_path) as replicas:
        first = await pushing([r.url for r in replicas])
        assert (await load(first, 1, adapter(tmp_path, 1))).status_code == 200
        shutil.rmtree(tmp_path / "trainer")
        await first.daemon.stop()
        second = await pushing([r.url for r in replicas])
        assert (await second.complete("trl-policy-v1", [1, 2, 3])).status_code == 200
        before = [len(r.calls(LOAD)) for r in replicas]
        assert before == [1, 1]  # nothing was loaded again
        await replicas[1].restart()
        await second.until(lambda: len(second.daemon.replicas.fleet.routable()) == 1)
        await second.until_ready(2)
        assert list(paths_of(replicas[1])) == ["trl-policy-v1"]


async def test_a_replica_that_dies_half_way_is_left_out_and_the_others_commit(
    pushing, tmp_path, monkeypatch
):
    """Its host is there, its server is not: the files are on their way when it goes."""
    sending, gone = asyncio.Event(), asyncio.Event()
    pieces = proxy.pushing._pieces

    async def held(file: Path) -> AsyncIterator[bytes]:
        sending.set()
        await gone.wait()
        async for piece in pieces(file):
            yield piece

    monkeypatch.setattr(proxy.pushing, "_pieces", held)
    async with pushed_to(tmp_path, 3) as replicas:
        running = await pushing([r.url for r in replicas], adapter_transport="push")
        path = adapter(tmp_path, 1)
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(load(running, 1, path))
            await sending.wait()
            replicas[2].refuse()
            gone.set()
        answer = loading.result()
        assert answer.status_code == 200, answer.text
        assert [list(r.names) for r in replicas] == [["trl-policy-v1"], ["trl-policy-v1"], []]


async def test_what_a_replica_refuses_goes_by_the_shared_path_instead(pushing, tmp_path, caplog):
    async with contextlib.AsyncExitStack() as stack:
        small = await stack.enter_async_context(
            SimulatedReplica(push_key=KEY, push_root=tmp_path / "small", push_max_mb=1)
        )
        running = await pushing([small.url])
        big = adapter(tmp_path, 1)
        write(Path(big, "optimizer.bin"), bytes(2 << 20))
        assert (await load(running, 1, big)).status_code == 200
        assert paths_of(small)["trl-policy-v1"] == big
        assert "the shared path is used: 413" in caplog.text

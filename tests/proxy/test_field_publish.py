"""Field reports K1: what a shared mount shows of a new adapter, and when."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks.adapter import CONFIG, WEIGHTS
from benchmarks.bucket import LaggingFolder
from benchmarks.replica import SimulatedReplica
from broadcast import publication
from tests.proxy.trainer import LOAD, UNLOAD, load, policy, publish, save

NO_ADAPTER = (
    b'{"error":{"message":"Loading lora trl-policy-v1 failed: No adapter found for /lora/x",'
    b'"type":"NotFoundError","param":null,"code":404}}'
)


class Growing:
    """A mount of its own that shows nothing, then a whole configuration and ever more weights.

    It moves on with each look at the configuration, as every load begins with one. ``whole_at``
    is the look that sees everything, None for never.
    """

    def __init__(self, whole_at: int | None = 7) -> None:
        self.whole_at = whole_at
        self.looks = 0

    def read(self, path: str) -> bytes:
        data = Path(path).read_bytes()
        if path.endswith(CONFIG):
            self.looks += 1
            if self.looks <= 2 and self.whole_at is not None:
                raise FileNotFoundError(2, "No such file or directory", path)
        if path.endswith(WEIGHTS) and (self.whole_at is None or self.looks < self.whole_at):
            return data[: len(data) * min(self.looks, 6) // 8]
        return data


@pytest.mark.parametrize("restarting", [False, True])
async def test_a_mount_that_remembers_a_miss_delays_only_its_own_replica(
    start, tmp_path, restarting
):
    """O-01. With a memory that each look starts anew, the waits have to grow past it."""
    folder = LaggingFolder(tmp_path, lag_s=0.2, negative_ttl_s=0.2, restarting=restarting)
    async with SimulatedReplica() as a, SimulatedReplica(folder=folder) as b:
        running = await start([a.url, b.url], load_retry_max_s=0.5)
        loop = asyncio.get_running_loop()
        path = save(tmp_path, 1)
        visible_s = loop.time() + folder.lag_s
        answer = await load(running, policy(1), path)
        assert answer.status_code == 200
        assert list(b.names) == [policy(1)]
        assert (len(a.calls(LOAD)), len(b.calls(LOAD)) > 1) == (1, True)
        assert loop.time() - visible_s <= 5  # without growing waits it never comes


async def test_a_mount_that_never_forgets_while_it_is_asked_is_left_alone_for_a_while(
    start, tmp_path, monkeypatch
):
    """O-01 with a memory of 30 s, longer than the longest usual wait."""
    monkeypatch.setattr(publication, "QUIET_AFTER_S", 0.3)
    monkeypatch.setattr(publication, "QUIET_S", 0.6)
    folder = LaggingFolder(tmp_path, lag_s=0.7, negative_ttl_s=0.5, restarting=True)
    async with SimulatedReplica() as a, SimulatedReplica(folder=folder) as b:
        running = await start([a.url, b.url], load_retry_max_s=0.1, load_timeout_s=5.0)
        answer = await load(running, policy(1), save(tmp_path, 1))
        assert answer.status_code == 200
        (shown,) = (await running.status())["publications"]
        assert shown["dropped"] == []
        assert shown["attempts"]["r1"] > 2
        assert list(b.names) == [policy(1)]


async def test_weights_that_grow_in_sight_of_a_replica_are_waited_for(start, tmp_path):
    """O-02. The configuration is there first, the weights come in pieces: vLLM answers 500."""
    folder = Growing()
    async with SimulatedReplica() as a, SimulatedReplica(folder=folder) as b:
        running = await start([a.url, b.url])
        answer = await load(running, policy(1), save(tmp_path, 1))
        assert answer.status_code == 200
        assert [call.status for call in b.calls(LOAD)] == [404, 404, 500, 500, 500, 500, 200]
        assert len(a.calls(LOAD)) == 1
        assert not any(call.body != b"{}" for r in (a, b) for call in r.calls(UNLOAD))


async def test_weights_that_stay_corrupt_end_in_one_error_and_a_roll_back(start, tmp_path):
    """O-02. The same 500 after the deadline."""
    async with SimulatedReplica() as a, SimulatedReplica(folder=Growing(whole_at=None)) as b:
        running = await start([a.url, b.url], load_timeout_s=0.5, min_replicas="all")
        answer = await load(running, policy(1), save(tmp_path, 1))
        assert answer.status_code == 504
        assert "Error while deserializing header" in answer.json()["error"]["message"]
        assert [list(r.names) for r in (a, b)] == [[], []]
        assert (await running.complete(policy(1), [1])).status_code == 404


async def test_the_policies_before_are_served_while_one_replica_stays_blind(
    start, pair, tmp_path, caplog
):
    """O-03. It leaves rotation at the deadline; the log and a metric tell who, and for how long."""
    async with SimulatedReplica() as c:
        running = await start([r.url for r in (*pair, c)], load_timeout_s=1.5)
        await publish(running, tmp_path, 0)
        await running.until_ready(3)
        c.faults.add(LOAD, status=404, body=NO_ADAPTER)
        path = save(tmp_path, 1)
        call = asyncio.ensure_future(load(running, policy(1), path))
        served = 0
        while not call.done():
            # Within the vocabulary, however many a fast machine gets through.
            assert (await running.complete(policy(0), [served % 50])).status_code == 200
            served += 1
        assert served > 3
        assert (await call).status_code == 200
        assert [list(r.names) for r in pair] == [[policy(0), policy(1)]] * 2
        (line,) = [m for m in caplog.messages if "which is left out" in m]
        assert f"r2 ({c.url})" in line
        found = re.search(r"after (\d+) attempts in \d+\.\d\d s", line)
        assert found
        # The first call was for the policy before; the last may not have arrived by the deadline.
        assert 1 < int(found[1]) <= len(c.calls(LOAD))
        assert "No adapter found" in line
        page = (await running.client.get("/metrics")).text
        assert 'adapter_load_attempts_total{replica="r2",result="not_visible"}' in page
        assert 'adapter_load_attempts_total{replica="r0",result="not_visible"}' not in page


async def test_where_all_replicas_are_needed_a_blind_one_rolls_back(start, pair, tmp_path):
    """O-03 under ``--min-replicas all``: unloaded from the others, and never 404."""
    async with SimulatedReplica() as c:
        running = await start([r.url for r in (*pair, c)], load_timeout_s=0.5, min_replicas="all")
        await publish(running, tmp_path, 0)
        c.faults.add(LOAD, status=404, body=NO_ADAPTER)
        path = save(tmp_path, 1)
        answer = await load(running, policy(1), path)
        assert answer.status_code == 504
        assert answer.headers["x-rollmux-error"] == "adapter_not_visible"
        message = answer.json()["error"]["message"]
        assert f"r2 is {c.url}" in message
        assert re.search(r"after \d+ attempts in \d+\.\d s", message)
        assert [list(r.names) for r in (*pair, c)] == [[policy(0)]] * 3
        assert (await running.complete(policy(0), [1])).status_code == 200

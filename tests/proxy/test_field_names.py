"""Field reports K2: what a name stands for, on every replica and in every cache."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from tests.proxy.scripted import error, until
from tests.proxy.trainer import LOAD, UNLOAD, Trainer, load, policy, publish, save

PATH = "/v1/completions"
PROMPT = list(range(64))


async def tokens(running, name: str) -> list[int]:
    answer = await running.complete(name, PROMPT)
    assert answer.status_code == 200
    return answer.json()["choices"][0]["token_ids"]


async def on_both(running, pair, name: str) -> list[list[int]]:
    """What each replica answers, asked through the daemon until both have been."""
    seen: dict[str, list[int]] = {}
    for number in itertools.count():
        # Only the first tokens decide where it goes; the reply is that of the whole prompt.
        answer = await running.complete(name, PROMPT if number % 2 else [*PROMPT, number])
        if number % 2:
            seen[answer.headers["x-rollmux-replica"]] = answer.json()["choices"][0]["token_ids"]
        if len(seen) == len(pair) or number > 40:
            return list(seen.values())
    raise AssertionError


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_name_unloaded_and_loaded_with_other_bytes_never_answers_with_the_old(
    start, pair, tmp_path, forgotten
):
    """O-04. vLLM's prefix cache goes by name, and outlives an unload of the name."""
    running = await start(
        [r.url for r in pair], retire_grace_s=0.1 if forgotten else 60.0, router="round-robin"
    )
    await publish(running, tmp_path / "one", 1)
    old = [await tokens(running, policy(1)) for _ in pair]
    await running.client.post(UNLOAD, json={"lora_name": policy(1)})
    if forgotten:
        await running.until(lambda: not any(r.names for r in pair))
    await publish(running, tmp_path / "two", 1, seed="other")
    expected = pair[0].expected_tokens(policy(1), PROMPT, 8)
    assert expected not in old
    assert [await tokens(running, policy(1)) for _ in pair] == [expected] * 2


async def test_a_cache_that_does_not_clear_at_once_is_cleared_before_the_load_is_answered(
    start, pair, tmp_path
):
    """O-04. vLLM answers 200 with ``success`` false while blocks are held."""
    running = await start([r.url for r in pair])
    await publish(running, tmp_path / "one", 1)
    reset = "/reset_prefix_cache"
    held = len(pair[1].calls(reset))
    pair[1].faults.add(reset, status=200, body=b'{"success":false}', times=2)
    await publish(running, tmp_path / "two", 1, seed="other")
    assert len(pair[1].calls(reset)) == held + 3
    last = [c.path for c in pair[1].log if c.path in (reset, LOAD)]
    assert last[-4:] == [reset, reset, reset, LOAD]


@pytest.mark.parametrize("same_path", [False, True])
@pytest.mark.parametrize("new_daemon", [False, True])
async def test_names_of_an_earlier_trainer_are_taken_over(
    start, pair, tmp_path, new_daemon, same_path
):
    """O-05. Numbering begins again, in another folder or in the same one with other bytes."""
    settings = {"router": "round-robin"}
    running = await start([r.url for r in pair], **settings)
    earlier = Trainer(running, tmp_path)
    for _ in range(5):
        await earlier.sync()
    old = await tokens(running, policy(1))
    if new_daemon:
        await running.daemon.stop()
        running = await start([r.url for r in pair], **settings)
    folder = tmp_path if same_path else tmp_path / "resumed"
    for version in (1, 2):
        await publish(running, folder, version, seed="resumed")
    for version in (1, 2):
        expected = pair[0].expected_tokens(policy(version), PROMPT, 8)
        assert expected != old
        assert [await tokens(running, policy(version)) for _ in pair] == [expected] * 2


async def test_an_unload_waits_for_the_load_of_its_name(start, pair, tmp_path):
    """O-06. Otherwise it is told 404, and the name stays for ever."""
    pair[1].faults.add(LOAD, late_s=0.3)
    running = await start([r.url for r in pair], retire_grace_s=0.1)
    path = save(tmp_path, 7)
    loading = asyncio.ensure_future(load(running, policy(7), path))
    await running.until(lambda: len(pair[1].calls(LOAD)) == 1)
    answer = await running.client.post(UNLOAD, json={"lora_name": policy(7)})
    assert answer.status_code == 200
    assert (await loading).status_code == 200
    await running.until(lambda: not any(r.names for r in pair))


async def test_a_load_waits_for_the_unload_of_its_name(start, pair, tmp_path):
    """O-06. Otherwise the late unload takes away what was just published."""
    running = await start([r.url for r in pair], retire_grace_s=0.1, own_copies="auto")
    await publish(running, tmp_path, 7)
    pair[1].faults.add(UNLOAD, delay_s=0.4)
    told = len(pair[1].calls(UNLOAD))
    await running.client.post(UNLOAD, json={"lora_name": policy(7)})
    await running.until(lambda: len(pair[1].calls(UNLOAD)) == told + 1)
    await publish(running, tmp_path, 7)
    assert [list(r.names) for r in pair] == [[policy(7)]] * 2
    await until(lambda: all(c.answered_s for c in pair[1].calls(UNLOAD)))
    assert [list(r.names) for r in pair] == [[policy(7)]] * 2
    assert await tokens(running, policy(7)) == pair[0].expected_tokens(policy(7), PROMPT, 8)
    assert [copy.exists() for copy in (tmp_path / ".rollmux").iterdir()] == [True]


async def test_two_loads_of_one_name_from_two_paths_follow_each_other(start, pair, tmp_path):
    """O-06. The last one asked for is what stays, everywhere."""
    running = await start([r.url for r in pair])
    paths = [save(tmp_path / str(n), 1, str(n)) for n in (1, 2)]
    answers = await asyncio.gather(*(load(running, policy(1), path) for path in paths))
    assert [a.status_code for a in answers] == [200, 200]
    assert {r.names[policy(1)].path for r in pair} == {str(paths[1])}
    (row,) = [c for c in (await running.client.get("/v1/models")).json()["data"] if c["parent"]]
    assert row["root"] == str(paths[1])


class TwoRegistries(SimulatedReplica):
    """Two front ends behind one address: only one of them knows what was loaded."""

    async def _handle(self, arrival: Arrival) -> Reply:
        if arrival.path == PATH and b'"trl-policy' in arrival.body and arrival.connection % 2:
            return error(404, "The model `trl-policy-v1` does not exist.", "NotFoundError")
        return await super()._handle(arrival)


async def test_a_replica_that_half_knows_a_name_is_neither_fed_nor_reloaded_in_a_loop(
    start, tmp_path
):
    """O-07. The trainer sees no 404, and the replica is tried ever more rarely."""
    async with SimulatedReplica() as a, TwoRegistries() as b:
        running = await start([a.url, b.url], router="round-robin")
        await publish(running, tmp_path, 1)
        now_s = running.daemon.replicas.now_s
        lost = []
        running.daemon.replicas.on_transition.append(
            lambda moved: lost.append(now_s()) if moved.code == "lost_adapter" else None
        )
        for batch in range(12):
            answers = await asyncio.gather(
                *(running.complete(policy(1), [batch, n]) for n in range(8))
            )
            assert {x.status_code for x in answers} == {200}
            await running.daemon.replicas.changed(0.1)
        assert lost, "the fault was never met"
        # It is let back after 1, 3, 7 and 15 s.
        assert len(lost) <= 1 + sum(now_s() - lost[0] > at_s for at_s in (1, 4, 11, 26))
        assert len(b.calls(LOAD)) == 1

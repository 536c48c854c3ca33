"""What outlives the daemon in ``--state-file``."""

from __future__ import annotations

import asyncio
import threading

import orjson

from benchmarks.adapter import write_adapter
from broadcast.ledger import Ledger
from broadcast.pause import Pause
from proxy import journal

LOAD = "/v1/load_lora_adapter"


async def publish(running, folder, name: str, seed: int) -> None:
    path = write_adapter(folder / name, seed=seed)
    answer = await running.client.post(LOAD, json={"lora_name": name, "lora_path": str(path)})
    assert answer.status_code == 200


async def test_a_replica_away_at_the_restart_still_gets_every_live_adapter(start, pair, tmp_path):
    """Its empty list says nothing: the journal says what the run needs."""
    state = str(tmp_path / "state")
    first = await start([r.url for r in pair], state_file=state)
    await publish(first, tmp_path, "trl-policy-v1", 1)
    await first.client.post("/pause?mode=keep")
    await first.daemon.stop()
    await pair[1].restart()
    second = await start([r.url for r in pair], state_file=state)
    assert list(pair[1].names) == ["trl-policy-v1"]
    assert (await second.status())["policy"]["live"] == ["trl-policy-v1"]


async def test_a_load_that_was_never_committed_is_swept_at_the_restart(start, pair, tmp_path):
    state = tmp_path / "state"
    first = await start([r.url for r in pair], state_file=str(state))
    await publish(first, tmp_path, "trl-policy-v1", 1)
    before = state.read_bytes()
    await publish(first, tmp_path, "trl-policy-v2", 2)
    await first.daemon.stop()
    state.write_bytes(before)  # as if the daemon had died inside the second load
    second = await start([r.url for r in pair], state_file=str(state))
    assert [list(r.names) for r in pair] == [["trl-policy-v1"]] * 2
    assert (await second.complete("trl-policy-v2", [1])).status_code == 404


async def test_a_journal_of_another_run_is_left_out(start, pair, tmp_path, caplog):
    state = tmp_path / "state"
    first = await start([r.url for r in pair], state_file=str(state))
    await publish(first, tmp_path, "trl-policy-v1", 1)
    await first.daemon.stop()
    other = orjson.loads(state.read_bytes()) | {"run_id": "rollmux-other"}
    other["ledger"]["live"][0]["name"] = "trl-policy-v9"
    state.write_bytes(orjson.dumps(other))
    second = await start([r.url for r in pair], state_file=str(state))
    assert (await second.status())["policy"]["live"] == ["trl-policy-v1"]
    assert "of another run" in caplog.text


async def test_a_damaged_journal_is_named_and_left_out(start, pair, tmp_path, caplog):
    state = tmp_path / "state"
    state.write_bytes(b'{"rollmux_journal": 1, "run')
    running = await start([r.url for r in pair], state_file=str(state))
    assert (await running.complete("tiny", [1])).status_code == 200
    assert str(state) in caplog.text


async def test_what_is_saved_last_is_what_was_last(tmp_path, monkeypatch):
    """Calls that are not in order with each other save beside each other, a thread each."""
    path, ledger = tmp_path / "state", Ledger()
    kept = journal.Journal(path, ledger, Pause())
    replace, later = journal._replace, threading.Event()

    def slow(*what):
        if b"late" not in what[1]:
            later.wait(0.5)  # for the one that came after, if it does not wait for us
        replace(*what)
        later.set()

    monkeypatch.setattr(journal, "_replace", slow)
    ledger.commit("early", "/early", 0.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.save("run"))
        await asyncio.sleep(0)
        ledger.commit("late", "/late", 1.0)
        group.create_task(kept.save("run"))
    assert b"late" in path.read_bytes()

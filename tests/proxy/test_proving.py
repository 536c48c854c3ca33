"""The proof that a policy name stands for the same weights everywhere."""

from __future__ import annotations

from benchmarks.adapter import write_adapter
from benchmarks.replica import SimulatedReplica

LOAD = "/v1/load_lora_adapter"


async def publish(running, folder, name: str = "trl-policy-v1") -> None:
    path = write_adapter(folder / name, seed=1)
    answer = await running.client.post(LOAD, json={"lora_name": name, "lora_path": str(path)})
    assert answer.status_code == 200


def proofs(running, outcome: str) -> float:
    return running.daemon.metrics.weight_proofs.labels(outcome)._value.get()


async def test_equal_weights_are_proven_once(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    await publish(running, tmp_path)
    await running.until(lambda: proofs(running, "agree") == 1)
    asked = [len(r.calls("/v1/completions")) for r in pair]
    assert asked == [2, 2]
    await publish(running, tmp_path, "trl-policy-v2")
    await running.complete("trl-policy-v2", [1])
    assert sum(len(r.calls("/v1/completions")) for r in pair) == 5


async def test_a_replica_that_serves_the_base_model_is_found_and_taken_out(start, tmp_path, caplog):
    """It lists the name and answers 200; only the numbers show it."""
    async with SimulatedReplica() as a, SimulatedReplica(base_under_every_name=True) as b:
        running = await start([a.url, b.url])
        await publish(running, tmp_path)
        await running.until(lambda: proofs(running, "differ") == 1)
        await running.until_ready(1)
        assert "r1 answers as the base model does" in caplog.text
        status = {r["id"]: r for r in (await running.status())["replicas"]}
        assert status["r1"]["error_code"] == "wrong_weights"
        answer = await running.complete("trl-policy-v1", [1])
        assert answer.headers["x-rollmux-replica"] == "r0"


async def test_with_eager_pauses_the_proof_comes_after_the_resume(start, pair, tmp_path):
    """The load falls into the pause, in which nothing is generated."""
    running = await start([r.url for r in pair], pause="eager")
    await running.client.post("/pause?mode=keep")
    await publish(running, tmp_path)
    await running.client.post("/resume")
    await running.until(lambda: proofs(running, "agree") == 1)


async def test_a_proof_that_is_not_answered_in_time_takes_no_replica_out(start, pair, tmp_path):
    """In a queue full of long rollouts it may wait for minutes."""
    running = await start([r.url for r in pair], control_timeout_s=0.2)
    for replica in pair:
        replica.faults.add("/v1/completions", hang=True)
    states: list[str] = []
    running.daemon.replicas.on_transition.append(lambda moved: states.append(moved.new))
    await publish(running, tmp_path)
    await running.until(lambda: proofs(running, "unclear") == 1)
    assert states == []

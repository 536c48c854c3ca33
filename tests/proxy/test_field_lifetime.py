"""Field reports K4: names that the trainer has let go of, and the slots they take."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.replica import SimulatedReplica
from tests.proxy.scripted import until
from tests.proxy.trainer import UNLOAD, Trainer, policy, publish

PATH = "/v1/completions"
INFO = "/server_info?config_format=json"
PROMPT = [1, 2, 3]


async def begun(running, replicas, name: str, **fault):
    """A generation under way, held by a fault: its task, who has it, and who has not."""
    # The daemon's own look at the first policy's weights: two calls each, not to be mistaken.
    await until(lambda: all(len(r.calls(PATH)) == 2 and not r.in_flight for r in replicas))
    for replica in replicas:
        replica.faults.add(PATH, **fault)
    task = running.daemon.tasks.start(running.complete(name, PROMPT), "rollout")
    await until(lambda: any(len(r.calls(PATH)) == 3 for r in replicas))
    for replica in replicas:
        replica.faults.clear()
    return task, *sorted(replicas, key=lambda r: -len(r.calls(PATH)))


async def test_a_rollout_of_an_unloaded_name_whose_replica_resets_is_served_elsewhere(
    start, pair, tmp_path
):
    """O-12. The trainer is six syncs on, has unloaded v1 and deleted its directory."""
    running = await start([r.url for r in pair], own_copies="auto")
    trainer = Trainer(running, tmp_path)
    await trainer.sync()
    rollout, holder, other = await begun(running, pair, policy(1), hang=True)
    for _ in range(6):
        await trainer.sync()
    assert not (tmp_path / policy(1)).exists()
    assert (await running.status())["policy"]["retired"] == [policy(1), policy(2)]
    expected = other.expected_tokens(policy(1), PROMPT, 8)
    holder.refuse()
    await holder.listen()
    answer = await rollout
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["token_ids"] == expected
    assert other.calls(PATH)[-1].body == holder.calls(PATH)[-1].body
    await running.daemon.publishing.sweep_once()
    again = await running.complete(policy(1), PROMPT)  # TRL's own retry: the same payload
    assert again.status_code == 200


async def test_an_unload_is_answered_while_a_rollout_of_the_name_runs_on(start, tmp_path):
    """O-12. It returns at once, and the replicas are told only after the last rollout."""
    async with SimulatedReplica() as a:
        running = await start([a.url], retire_grace_s=0.0)
        await publish(running, tmp_path, 1)
        rollout, *_ = await begun(running, (a,), policy(1), delay_s=1.5)
        answer = await running.client.post(UNLOAD, json={"lora_name": policy(1)})
        assert answer.status_code == 200
        await running.daemon.publishing.sweep_once()
        assert not rollout.done()
        assert list(a.names) == [policy(1)]
        assert (await rollout).status_code == 200
        await until(lambda: not a.names)


@pytest.mark.parametrize("holder_lives", [False, True])
async def test_a_name_whose_files_are_gone_goes_only_where_it_is_in_use(
    start, pair, tmp_path, holder_lives
):
    """O-12. An engine that has pushed it out of its slots dies of reading it again."""
    running = await start([r.url for r in pair], router="round-robin", hold_s=0.2)
    await publish(running, tmp_path, 1)
    rollout, holder, other = await begun(running, pair, policy(1), hang=True)
    await running.client.post(UNLOAD, json={"lora_name": policy(1)})
    shutil.rmtree(tmp_path / policy(1))
    other.engine.adapters.clear()  # pushed out by later ones
    await running.daemon.publishing.sweep_once()
    if holder_lives:
        for n in range(3):
            assert (await running.complete(policy(1), [n])).status_code == 200
        assert len(holder.calls(PATH)) == 6
        rollout.cancel()
    else:
        holder.refuse()
        answer = await rollout
        assert answer.status_code in (404, 503)
        assert policy(1) in answer.json()["error"]["message"]
    assert len(other.calls(PATH)) == 2
    assert not other.engine.dead


async def test_many_syncs_with_enough_slots_push_nothing_out_and_warn_of_nothing(
    start, tmp_path, caplog
):
    """O-13. An unload frees no slot: what is left over is pushed out, and its files are gone."""
    async with SimulatedReplica(max_loras=3, max_cpu_loras=6) as a:
        running = await start([a.url], retire_grace_s=0.0)
        trainer = Trainer(running, tmp_path, staleness=1)
        for _ in range(20):
            await trainer.sync()
            for version in {trainer.version, max(1, trainer.version - 1)}:
                answer = await running.complete(policy(version), [1, 2, 3])
                assert answer.status_code == 200
                expected = a.expected_tokens(policy(version), [1, 2, 3], 8)
                assert answer.json()["choices"][0]["token_ids"] == expected
        assert not a.engine.dead
        assert "max_loras" not in caplog.text
        assert "max_cpu_loras" not in caplog.text


@pytest.mark.parametrize(
    ("slots", "words"), [((2, 6), "--max-loras 3"), ((3, 4), "--max-cpu-loras 6")]
)
async def test_too_few_slots_are_told_as_soon_as_the_staleness_shows(
    start, tmp_path, caplog, slots, words
):
    """O-13. With a staleness of 1 the third sync is the first that needs three."""
    async with SimulatedReplica(max_loras=slots[0], max_cpu_loras=slots[1]) as a:
        running = await start([a.url])
        trainer = Trainer(running, tmp_path, staleness=1)
        for _ in range(3):
            await trainer.sync()
        assert words in caplog.text
        caplog.clear()
        for _ in range(5):
            await trainer.sync()
        assert words not in caplog.text


async def test_the_same_weakest_facts_are_told_whoever_is_asked_first(start):
    """O-14. max_loras is 6, 5, and on the third there is no LoRA at all."""
    async with (
        SimulatedReplica(max_loras=6) as a,
        SimulatedReplica(max_loras=5) as b,
        SimulatedReplica(lora=False) as c,
    ):
        running = await start([a.url, b.url], router="round-robin")
        answers = {(await running.client.get(INFO)).content for _ in range(4)}
        assert len(answers) == 1
        assert b'"max_loras":5' in answers.pop()
        running = await start([a.url, b.url, c.url])
        answers = {(await running.client.get(INFO)).content for _ in range(4)}
        assert len(answers) == 1
        assert b'"lora_config":null' in answers.pop()


async def test_replicas_of_two_shapes_are_reported_and_never_shown_as_one(start):
    """O-14. With data parallelism on one of them TRL would choose another way to sync."""
    async with SimulatedReplica() as a, SimulatedReplica(data_parallel_size=2) as b:
        running = await start([a.url, b.url])
        answer = await running.client.get(INFO)
        assert answer.status_code == 502
        message = answer.json()["error"]["message"]
        assert "data_parallel_size is 1 on replica r0" in message
        assert f"2 on replica r1 ({b.url})" in message

"""What the replicas can take, as they come and go."""

from __future__ import annotations

from benchmarks.replica import SimulatedReplica


async def test_the_limits_are_those_of_the_replicas_that_are_there(start):
    async with SimulatedReplica(max_lora_rank=8) as a, SimulatedReplica(max_lora_rank=16) as b:
        running = await start([a.url, b.url])
        limits = running.daemon.rejoin.weakest_lora
        assert limits().max_lora_rank == 8
        running.daemon.control.remove_replica("r0", drain=False)
        assert limits().max_lora_rank == 16


async def test_a_replica_started_anew_is_asked_for_its_limits_again(start):
    async with SimulatedReplica(max_lora_rank=8) as first:
        running = await start([first.url])
        port = first.port
        await first.close()
        await running.until_ready(0)
        async with SimulatedReplica(port=port, max_lora_rank=16):
            await running.until_ready(1)
            assert running.daemon.rejoin.weakest_lora().max_lora_rank == 16

"""Bodies that were in flight when engines died: alone, and after a third death not at all."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from broadcast.answer import Cause
from broadcast.fleet import ReplicaState, Transition
from proxy.upstream import UpstreamBroken
from tests.proxy.scripted import OK, ScriptedReplica, Tap, error, event, until

PATH = "/v1/completions"
DEAD = error(
    500,
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "InternalServerError",
)
KILLER = [6, 6, 6]


@pytest.fixture
async def fleet():
    """Four replicas whose engine dies of one prompt; what it takes along gets 500 too."""
    deaths: list[ScriptedReplica] = []
    running: dict[ScriptedReplica, set[asyncio.Future[Reply]]] = {}
    slow = asyncio.Event()
    together: list[int] = []

    def replica() -> ScriptedReplica:
        async def script(arrival: Arrival) -> Reply:
            mine = running.setdefault(self, set())
            if b"[6,6,6]" in arrival.body:
                together.append(len(mine))
                deaths.append(self)
                for other in mine:
                    other.set_result(DEAD)
                mine.clear()
                return DEAD
            if b",7]" not in arrival.body:
                return Reply(200, OK)
            answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            mine.add(answer)
            freed = asyncio.ensure_future(slow.wait())
            await asyncio.wait((answer, freed), return_when="FIRST_COMPLETED")
            freed.cancel()
            mine.discard(answer)
            return answer.result() if answer.done() else Reply(200, OK)

        self = ScriptedReplica(script)
        return self

    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(replica()) for _ in range(4)]
        yield Fleet(replicas, deaths, slow, together)


class Fleet:
    def __init__(self, replicas, deaths, slow, together) -> None:
        self.replicas = replicas
        self.deaths = deaths
        self.slow = slow
        """Set: generations that wait are answered."""
        self.together = together
        """How many others ran beside the killer at each death."""

    @property
    def urls(self) -> list[str]:
        return [r.url for r in self.replicas]


async def test_a_killer_is_refused_after_its_third_engine_and_so_are_repeats(start, fleet):
    running = await start(fleet.urls)
    first = await running.complete("tiny", KILLER)
    assert first.status_code == 502  # two engines, two tries
    assert first.headers["x-rollmux-error"] == "upstream_lost"
    assert len(fleet.deaths) == 2
    for _ in range(5):
        again = await running.complete("tiny", KILLER)
        assert again.status_code == 500
        assert again.headers["x-rollmux-error"] == "suspect_request"
        assert again.json()["error"]["code"] == 500
    assert len(fleet.deaths) == 3
    other = await running.complete("tiny", [1])
    assert other.status_code == 200


async def test_after_two_deaths_it_goes_out_only_to_an_idle_replica(start, fleet):
    """A third death then is proof, and takes nobody along."""
    running = await start(fleet.urls)
    assert (await running.complete("tiny", KILLER)).status_code == 502
    await running.until(lambda: len(running.daemon.replicas.fleet.routable()) == 4)
    others = [running.daemon.tasks.start(running.complete("tiny", [n, 7]), "client")
              for n in range(8)]  # fmt: skip
    await until(lambda: running.daemon.replicas.fleet.inflight() == 8)
    third = running.daemon.tasks.start(running.complete("tiny", KILLER), "client")
    await until(lambda: running.daemon.replicas._reserved)
    (reserved,) = running.daemon.replicas._reserved
    for number in range(6):
        answer = await running.complete("tiny", [1, number])
        assert answer.headers["x-rollmux-replica"] != reserved
    assert len(fleet.deaths) == 2
    fleet.slow.set()
    assert (await third).status_code == 500
    assert fleet.together[2] == 0
    for task in others:
        assert (await task).status_code == 200
    assert not running.daemon.replicas._reserved


async def test_a_bystander_of_two_deaths_is_cleared_by_a_whole_answer(start, fleet):
    """Alone it does no harm, so from then on it is as free as any other."""
    running = await start(fleet.urls[:2])
    replicas = running.daemon.replicas
    bystander = running.daemon.tasks.start(running.complete("tiny", [0, 7]), "client")
    for death in (1, 2):
        await until(lambda n=death: sum(len(r.generations) for r in fleet.replicas) == n)
        (carrying,) = [r for r in replicas.fleet if r.inflight]
        (body,) = replicas._bodies[carrying.id].values()
        replicas.died(carrying, "killed by a test")
    assert (await bystander).status_code == 502
    assert replicas.suspicion(body) == "alone"
    fleet.slow.set()
    await running.until_ready(2)
    assert (await running.complete("tiny", [0, 7])).status_code == 200
    assert replicas.suspicion(body) == "free"


async def test_connections_lost_to_a_living_engine_raise_no_suspicion(start, fleet):
    running = await start(fleet.urls[:2])
    for replica in fleet.replicas[:2]:
        replica.faults.add(PATH, reset=True, times=1)
    assert (await running.complete("tiny", [1])).status_code == 502
    await running.until_ready(2)
    replicas = running.daemon.replicas
    assert not len(replicas._suspects)
    for replica in replicas.fleet:  # it dies of something else, soon after
        replicas.died(replica, "killed by a test")
    assert not len(replicas._suspects)
    await running.until_ready(2)
    assert (await running.complete("tiny", [1])).status_code == 200


@pytest.mark.parametrize("seen", ["refused", "restarted"])
async def test_a_connection_lost_just_before_its_replica_is_found_gone_is_a_death(
    start, fleet, seen
):
    """By the traffic, whatever the probes see, or by a process that does not know our marker."""
    running = await start(fleet.urls[:1])
    replicas = running.daemon.replicas
    replica = replicas.fleet["r0"]
    lost = UpstreamBroken(Cause.RESET, "connection lost")
    for _ in range(2):
        replicas.broken(replica, replica.epoch, lost, b"the killer")
        if seen == "refused":
            refused = UpstreamBroken(Cause.REFUSED, "connection refused")
            replicas.broken(replica, replica.epoch, refused, b"another")
        else:
            states = replica.state, ReplicaState.JOINING
            replicas.apply((Transition(replica.id, *states, "restarted", "it restarted"),))
    assert replicas.suspicion(b"the killer") == "alone"
    assert replicas.suspicion(b"another") == "free"


async def test_connections_lost_to_a_process_that_is_gone_are_deaths(start):
    """A killed API server sends no 500: its sockets break, and then nothing listens."""
    async with AsyncExitStack() as stack:

        async def script(arrival: Arrival) -> Reply:
            for replica in replicas:
                if arrival in replica.generations:
                    replica.server.refuse()
            return Reply(200, OK)

        replicas = [await stack.enter_async_context(ScriptedReplica(script)) for _ in range(3)]
        running = await start([r.url for r in replicas], hold_s=0.3)
        assert (await running.complete("tiny", KILLER)).status_code == 502
        await running.until_ready(1)
        # The probe of the second one may still be on its way.
        await running.until(lambda: sum(running.daemon.replicas._suspects._deaths.values()) == 2)
        answer = await running.complete("tiny", KILLER)
        assert answer.headers["x-rollmux-error"] in ("suspect_request", "no_ready_replica")
        assert sum(len(r.generations) for r in replicas) == 3


async def test_a_stream_that_kills_engines_is_counted_as_well(start):
    dead = b"data: " + DEAD.body + b"\n\n"

    async def script(arrival: Arrival) -> Reply:
        tap = Tap()
        for piece in (event("one"), dead, b"data: [DONE]\n\n"):
            tap.put(piece)
        tap.end()
        return await tap.script(arrival)

    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(ScriptedReplica(script)) for _ in range(4)]
        running = await start([r.url for r in replicas])
        errors = []
        for _ in range(4):
            try:
                answer = await running.complete("tiny", KILLER, stream=True)
                errors.append(answer.headers.get("x-rollmux-error", "none"))
            except httpx.RemoteProtocolError:
                errors.append("broken")
        assert errors[3] == "suspect_request"
        assert sum(len(r.generations) for r in replicas) <= 4


async def test_a_client_that_leaves_while_its_body_waits_alone_frees_the_replica(start, fleet):
    running = await start(fleet.urls, hold_s=30.0)
    replicas = running.daemon.replicas
    assert (await running.complete("tiny", KILLER)).status_code == 502
    await running.until_ready(4)
    others = [running.daemon.tasks.start(running.complete("tiny", [n, 7]), "client")
              for n in range(8)]  # fmt: skip
    await until(lambda: replicas.fleet.inflight() == 8)
    waiting = running.daemon.tasks.start(running.complete("tiny", KILLER), "client")
    await until(lambda: replicas._reserved)
    waiting.cancel()
    await until(lambda: not replicas._reserved)
    assert not replicas.one_alone.locked()
    fleet.slow.set()
    await asyncio.wait(others)

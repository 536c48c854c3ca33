"""Replicas that come from a file or from DNS."""

from __future__ import annotations

from benchmarks.replica import SimulatedReplica
from proxy import sources
from proxy.body import parse
from proxy.settings import Secrets


async def test_the_fleet_follows_the_replicas_file(start, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FILE_S", 0.05)
    file = tmp_path / "replicas"
    file.write_text(f"# the fleet\n{pair[0].url}\n")
    running = await start([], ready=1, replicas_file=str(file))
    assert (await running.complete("tiny", [1])).status_code == 200
    file.write_text(f"{pair[0].url}  # first\n{pair[1].url}/\n")
    await running.until_ready(2)
    file.write_text(f"{pair[1].url}\n")
    await running.until(lambda: len(running.daemon.replicas.fleet) == 1)
    assert (await running.complete("tiny", [1])).headers["x-rollmux-replica"] == "r1"


async def test_a_bad_line_changes_nothing_and_is_named(start, pair, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sources, "FILE_S", 0.05)
    file = tmp_path / "replicas"
    file.write_text(pair[0].url)
    running = await start([], ready=1, replicas_file=str(file))
    file.write_text(f"{pair[1].url}\nftp://x\n")
    await running.until(lambda: "line 2" in caplog.text)
    assert [r.url for r in running.daemon.replicas.fleet] == [pair[0].url]
    file.write_text(f"{pair[1].url}\n")
    await running.until(lambda: [r.url for r in running.daemon.replicas.fleet] == [pair[1].url])


async def test_every_address_of_a_name_is_a_replica(start, pair):
    host = f"localhost:{pair[0].port}"
    running = await start([], ready=1, replicas_dns=host)
    assert f"http://127.0.0.1:{pair[0].port}" in [r.url for r in running.daemon.replicas.fleet]


async def test_an_address_leaves_only_when_it_is_gone_for_good(start, pair):
    running = await start([])
    follow = running.daemon.sources
    follow.take_addresses(["127.0.0.1"], "name", pair[0].port)
    await running.until_ready(1)
    for _ in range(sources.ABSENT_LOOKS + 1):
        follow.take_addresses([], "name", pair[0].port)
    assert len(running.daemon.replicas.fleet) == 1, "it is ready: the resolver must be wrong"
    pair[0].refuse()
    await running.until(lambda: not running.daemon.replicas.fleet.routable())
    follow.take_addresses([], "name", pair[0].port)
    await running.until(lambda: len(running.daemon.replicas.fleet) == 0)


async def test_replicas_of_a_list_that_the_operator_named_get_the_token(start, tmp_path):
    async with SimulatedReplica(bearer="secret") as a, SimulatedReplica(bearer="secret") as b:
        file = tmp_path / "replicas"
        file.write_text(a.url)
        dns = f"localhost:{b.port}"
        secrets = Secrets(token="secret")
        running = await start(
            [], ready=2, secrets=secrets, replicas_file=str(file), replicas_dns=dns
        )
        assert (await running.complete("tiny", [1])).status_code == 200


async def test_a_replica_that_drains_already_may_leave_the_list(start, pair, tmp_path, monkeypatch):
    """The list is followed further."""
    monkeypatch.setattr(sources, "FILE_S", 0.05)
    file = tmp_path / "replicas"
    file.write_text(f"{pair[0].url}\n")
    running = await start([], ready=1, replicas_file=str(file))
    replicas = running.daemon.replicas
    lease = replicas.begin(replicas.fleet["r0"], parse(b"{}"), b"{}")
    running.daemon.control.remove_replica("r0", drain=True)
    file.write_text(f"{pair[1].url}\n")
    await running.until_ready(1)
    assert [r.url for r in replicas.fleet.routable()] == [pair[1].url]
    replicas.end(lease)
    await running.until(lambda: len(replicas.fleet) == 1)

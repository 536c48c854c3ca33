"""The overhead benchmark counts what happens; no figure of it is looked at here."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.httpd import Arrival, Reply, Server
from benchmarks.overhead import __main__ as command
from benchmarks.overhead import proxies, soak, wire
from benchmarks.overhead.load import Load, Session, Target
from benchmarks.overhead.measure import Measured, measure, ratio, upstreams
from benchmarks.overhead.process import cores
from benchmarks.overhead.rows import ROWS, Row
from benchmarks.overhead.upstream import Answers

# --- the whole of it, with few requests -----------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        Row("whole", in_flight=4, requests=40),
        Row("stream", in_flight=4, requests=12, chunks=5, interval_s=0.001),
        Row("tls", prompt_tokens=40, reply_bytes=90_000, in_flight=4, requests=12, tls=True),
        Row("slow", in_flight=8, requests=16, delay_s=0.02, replicas=3),
    ],
    ids=lambda row: row.name,
)
def test_every_request_of_every_proxy_is_answered(row: Row, tmp_path: Path) -> None:
    names = ["direct", "aiohttp", "rollmux"]
    if row.name in ("tls", "slow"):
        names.remove("aiohttp")  # each proxy takes a second to start
    found = measure(row, names, 1, router=None, scratch=tmp_path, progress=lambda _: None)
    calm = 0 if row.delay_s or row.chunks else 20
    assert [one.name for one in found] == names
    for one in found:
        assert (one.missing, one.wrong, one.first_bad) == ("", {}, ""), one
        assert one.requests == row.requests + calm
        assert len(one.cpu_us) == len(one.per_s) == 1
        assert (one.memory_mb > 0) == (one.name != "direct")
        assert one.idle_ms_per_s < 1_000


def test_a_peer_that_is_not_there_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proxies, "find_router", lambda given: given)
    words = ["--rows", "135/2k", "--proxies", "direct,vllm-router", "--rounds", "1"]
    assert command.main([*words, "--requests", "8", "--in-flight", "2"]) == 0
    assert "vllm-router  not installed: vllm-router 0.1.17" in capsys.readouterr().out
    assert command.main([*words, "--requests", "8", "--in-flight", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["proxies"][0]["requests"] == 28
    assert row["ratios"] == {"aiohttp": None, "vllm-router": None}


def test_a_proxy_is_ready_before_the_first_slow_answer_and_the_first_stream(tmp_path: Path) -> None:
    """Its first generation is answered whole and at once, whatever the row's are."""
    answers = Answers(delay_s=1_000.0, chunks=1_000, interval_s=1_000.0)
    core, other = cores()
    with (
        upstreams(answers, 1, other) as urls,
        proxies.run("rollmux", urls, core=core, ca_file="", router=None, log=tmp_path / "log"),
    ):
        pass


def test_a_proxy_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    found = measure(
        Row("x", in_flight=1, requests=1), ["vllm-router"], 1,
        router=Path(sys.executable), scratch=tmp_path, progress=lambda _: None,
    )  # fmt: skip
    assert found[0].missing.startswith("did not start: vllm-router did not come up")
    assert "unknown option --host" in found[0].missing


@pytest.mark.parametrize("words", [["--rows", "nonsense"], ["--proxies", "x"], ["--rounds", "0"]])
def test_bad_usage_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


# --- what the load generator notices --------------------------------------------------------------


def answer(number: int, size: int = 400) -> bytes:
    body = wire.REPLY_START % (number, 1_000) + wire.reply_rest(size)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def chunked(number: int) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"%x\r\n%s\r\n" % (400, answer(number)[-400:])
        + b"0\r\n\r\n"
    )


def failed(number: int) -> bytes:
    return answer(number).replace(b"200 OK", b"500 No", 1)


@pytest.mark.parametrize(
    ("bad", "counted"),
    [
        (answer, {"good": 4}),
        (chunked, {"good": 4}),
        (failed, {"good": 3, "bad_status": 1}),
        (lambda number: answer(number + 1), {"good": 3, "wrong_body": 1}),
        (lambda number: answer(number, 401), {"good": 3, "wrong_body": 1}),
        (lambda number: answer(number) + answer(number), {"good": 4, "doubled": 1}),
        (lambda number: answer(number)[:-1] + b"CLOSE", {"good": 3, "lost": 1}),
        (lambda number: b"CLOSE", {"good": 3, "lost": 1}),
        (lambda number: b"", {"good": 1, "unanswered": 3}),
    ],
)
async def test_one_bad_answer_of_four_is_counted(bad, counted) -> None:
    """The bad one is the second; on one connection nothing follows one that never comes."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                number = wire.number_of([await reader.readexactly(length)])
                seen += 1
                data = bad(number) if seen == 2 else answer(number)
                writer.write(data.removesuffix(b"CLOSE"))
                if data.endswith(b"CLOSE"):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        load = Load(Target([("127.0.0.1", port)], 400, None), 1, streams=False)
        count, _ = await load.run(Session(40, stream=False).work(4, 0), deadline_s=0.5)
        load.close()
    kinds = ("good", "bad_status", "wrong_body", "lost", "doubled", "unanswered")
    assert {kind: n for kind in kinds if (n := getattr(count, kind))} == counted
    assert bool(count.first_bad) == (bad not in (answer, chunked) and "unanswered" not in counted)


# --- the parts ------------------------------------------------------------------------------------


def test_rollouts_come_in_groups_of_a_prompt_and_have_numbers_of_their_own() -> None:
    session = Session(100, stream=False)
    work = session.work(20, seed=3)
    assert len({number for number, _ in [*work, *session.work(20, seed=3)]}) == 40
    prompts = [json.loads(body + b"1}")["prompt"] for _, body in work]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts[0] == prompts[7] != prompts[8]
    assert {len(prompt) for prompt in prompts} == {100}
    assert {tuple(prompt[:23]) for prompt in prompts} == {tuple(prompts[0][:23])}


def test_a_request_is_recognised_also_where_a_proxy_wrote_it_anew() -> None:
    whole = b'{"prompt": [1, 2], "seed": 1000000000000000007}'
    assert wire.number_of([whole]) == 10**18 + 7
    assert wire.number_of([whole[:-25], whole[-25:]]) == 10**18 + 7
    assert wire.number_of([b'{"seed":1000000000000000', b'007,"prompt":[1,2]}']) == 10**18 + 7
    assert wire.number_of([b"{}"]) == 0


@pytest.mark.parametrize("size", [400, 2_000, 90_000, 2_000_000])
def test_a_reply_is_json_of_the_size_asked_for(size: int) -> None:
    body = wire.REPLY_START % (10**18 + 5, 1_250) + wire.reply_rest(size)
    assert len(body) == size
    assert json.loads(body)["choices"][0]["token_ids"]
    assert wire.id_of(body[: wire.ID_BYTES]) == (10**18 + 5, 0.00125)


def test_events_are_json_of_one_size() -> None:
    for coded in (wire.event(), wire.event(wire.REPLY_START % (10**18, 0))):
        length, data = coded.split(b"\r\n", 1)
        assert int(length, 16) == wire.EVENT_BYTES == len(data.removesuffix(b"\r\n"))
        json.loads(data.removeprefix(b"data: "))


def test_a_ratio_is_the_middle_one_of_the_rounds() -> None:
    ours = Measured("rollmux", cpu_us=[10.0, 90.0, 20.0])
    assert ratio(ours, Measured("aiohttp", cpu_us=[20.0, 20.0, 20.0])) == 1.0
    assert ratio(ours, Measured("aiohttp")) is None


def test_what_is_past_its_goal_is_missed() -> None:
    row = next(row for row in ROWS if row.name == "1000-in-flight")
    ours = Measured("rollmux", cpu_us=[46.0])
    peers = [Measured("aiohttp", cpu_us=[100.0]), Measured("vllm-router", cpu_us=[50.0])]
    assert command.Result(row, [ours, *peers]).missed() == [
        "1000-in-flight: 0.46 of aiohttp's CPU, allowed 0.45",
        "1000-in-flight: 0.92 of vllm-router's CPU, allowed 0.90",
    ]
    ours.cpu_us = [45.0]
    ours.wrong = {"lost": 1}
    assert command.Result(row, [ours, *peers]).missed() == [
        "1000-in-flight: rollmux {'lost': 1} of 0: "
    ]


# --- the soaks, with few requests -----------------------------------------------------------------


def quiet(_: str) -> None:
    pass


def test_delays_at_the_upstream_are_spread_evenly() -> None:
    delays = sorted(wire.delay_s(wire.NUMBERS + number, 2.0) for number in range(1, 1001))
    assert all(abs(d - (1.0 + 2.0 * rank / 1000)) < 0.01 for rank, d in enumerate(delays))


def test_mixed_requests_end_as_each_has_to_and_leave_nothing_in_flight(tmp_path: Path) -> None:
    """All kinds are among the first 50 numbers. Who leaves may have been answered just before."""
    verdict = soak.million(100, 50, 4, tmp_path, quiet)
    found = verdict.found
    assert found["wrong"] == {}, found
    assert (found["sent"], found["failed"], found["cut"]) == (100, 2, 1)
    assert found["good"] + found.get("left", 0) == 97
    assert found["requests counted by the daemon"] == 100
    at_rest = ("in flight by status", "held", "in flight by metrics")
    assert [found[name] for name in at_rest] == [0, 0, 0]
    assert len(found["memory MB"]) == 2


def test_in_flight_soak_counts_answers_and_what_is_left(tmp_path: Path) -> None:
    verdict = soak.in_flight(8, 16, tmp_path, quiet, delay_s=0.1)
    found = verdict.found
    assert (found["requests"], found["wrong"], found["sent twice to an upstream"]) == (16, {}, 0)
    assert (found["in flight by status"], found["in flight by metrics"]) == (0, 0)
    assert found["live failed"] == 0
    assert not {line for line in verdict.missed if line.startswith(("answers", "left"))}


def test_growth_compares_two_fleets(tmp_path: Path) -> None:
    found = soak.growth((1, 3), 20, 1, tmp_path, quiet).found
    assert len(found["CPU µs of 1-replicas"]) == len(found["CPU µs of 3-replicas"]) == 1


def test_table_soak_compares_half_of_the_bound_with_all_of_it() -> None:
    found = soak.table(2_000, 10, quiet).found
    half, full = found["blocks at the start"]
    assert half < 1_000 < full <= 2_000


@pytest.mark.parametrize("status", [0, 3])
async def test_what_is_left_in_flight_is_read_from_status_and_metrics(status: int) -> None:
    """A leak is not overlooked: what stays until the deadline is returned."""
    page = f'rollmux_replica_inflight{{replica="r0"}} {status}.0\nrollmux_replica_inflight_x 9\n'
    shown = {"replicas": [{"inflight": status}], "held": 0}

    async def answer(arrival: Arrival) -> Reply:
        text = page.encode() if arrival.path == "/metrics" else json.dumps(shown).encode()
        return Reply(200, text)

    server = Server(answer)
    await server.listen()
    try:
        left = await asyncio.to_thread(soak.left_in_flight, server.url, 0.2)
    finally:
        await server.close()
    assert left == {"in flight by status": status, "held": 0, "in flight by metrics": status}


def test_kinds_of_requests_are_as_frequent_as_their_page_says() -> None:
    kinds = Counter(wire.kind_of(wire.NUMBERS + number) for number in range(10_000))
    assert set(kinds) == set(wire.Kind)
    assert {kinds[kind] for kind in wire.Kind} == {8_979, 200, 20, 1}
    assert {wire.kind_of(wire.NUMBERS + number) for number in range(50)} == set(wire.Kind)

"""Replay over HTTP: real sockets, the real daemon, simulated replicas."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.daemon import daemon
from benchmarks.prompts import FIRST_TOKEN, Prompts
from benchmarks.replay import Options, replay
from benchmarks.replay_http import Counters, Fleet, HttpReplay, seen
from benchmarks.replay_http import Options as HttpOptions
from benchmarks.replica import SimulatedReplica
from benchmarks.trace import Request, read
from proxy.__main__ import main

ROOT = Path(__file__).parents[2]
BLOCK = 16
PATH = "/v1/completions"
DEADLINE_S = 30.0


def rollouts(count: int, *, group: int = 8, step_ms: int = 0, output: int = 20) -> list[dict]:
    """Groups of equal prompts, 40 tokens, under one template of a block."""
    return [
        {
            "timestamp": number * step_ms,
            "input_length": 40,
            "output_length": output,
            "hash_ids": [0, 1 + 2 * (number // group), 2 + 2 * (number // group)],
            "block_size": BLOCK,
        }
        for number in range(count)
    ]


def file_of(lines: Sequence[Any], folder: Path) -> str:
    file = folder / "t.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


@pytest.fixture
async def replica() -> AsyncIterator[SimulatedReplica]:
    async with SimulatedReplica(max_model_len=4096, vocab_size=32_000) as one:
        yield one


@pytest.fixture
async def pair() -> AsyncIterator[list[SimulatedReplica]]:
    async with (
        SimulatedReplica(vocab_size=32_000, step_s=0.002) as one,
        SimulatedReplica(vocab_size=32_000, step_s=0.002) as other,
    ):
        yield [one, other]


async def run(*words: str) -> int:
    """The command, in a thread: the servers are in this loop."""
    return await asyncio.to_thread(main, ["replay", *words])


def bodies(replica: SimulatedReplica) -> list[dict[str, Any]]:
    return [json.loads(arrival.body) for arrival in replica.calls(PATH)]


# --- prompts --------------------------------------------------------------------------------------


def tokens(prompts: Prompts, length: int, *ids: int, position: int = 0) -> list[int]:
    found = json.loads(prompts.of(position, Request(0.0, length, 1, array("q", ids))))
    assert len(found) == length
    return found


def test_prompts_share_the_blocks_that_their_ids_share():
    prompts = Prompts(BLOCK, 300, seed=1)
    one, other = tokens(prompts, 56, 7, 8, 9, 10), tokens(prompts, 50, 7, 8, 11, 12)
    assert one[:32] == other[:32]
    assert one[32:48] != other[32:48]
    assert one == tokens(Prompts(BLOCK, 300, seed=1), 56, 7, 8, 9, 10)
    assert one[:16] != tokens(Prompts(BLOCK, 300, seed=2), 56, 7, 8, 9, 10)[:16]


def test_no_two_blocks_are_the_same_and_no_token_is_outside_the_vocabulary():
    prompts = Prompts(BLOCK, 100, seed=0)
    blocks = [tokens(prompts, BLOCK, number) for number in range(5000)]
    assert len({tuple(block) for block in blocks}) == 5000
    assert {token for block in blocks for token in block} == set(range(FIRST_TOKEN, 100))


def test_the_end_of_a_prompt_that_the_trace_does_not_tell_is_its_own():
    prompts = Prompts(BLOCK, 300, seed=0)
    known = [tokens(prompts, 40, 1, 2, 3, position=position) for position in (0, 1)]
    unknown = [tokens(prompts, 40, 1, 2, position=position) for position in (0, 1)]
    assert known[0] == known[1]
    assert unknown[0][:32] == unknown[1][:32] == known[0][:32]
    assert unknown[0][32:] != unknown[1][32:]


# --- what is sent ---------------------------------------------------------------------------------


async def test_each_request_of_the_trace_is_sent_with_its_lengths(replica, tmp_path, capsys):
    lines = rollouts(3, group=1)
    lines[1] |= {"output_length": 40, "n": 2, "model": "tiny"}
    lines += [{"event": "publish", "timestamp": 0, "model": "tiny"}]
    assert await run(file_of(lines, tmp_path), "--url", replica.url, "--inflight", "1") == 0
    sent = bodies(replica)
    assert [len(body["prompt"]) for body in sent] == [40, 40, 40]
    assert [(body["max_tokens"], body.get("n")) for body in sent] == [
        (20, None),
        (20, 2),
        (20, None),
    ]
    assert all(body["ignore_eos"] is True and body["model"] == "tiny" for body in sent)
    assert sent[0]["prompt"][:BLOCK] == sent[1]["prompt"][:BLOCK]
    assert sent[0]["prompt"][BLOCK:32] != sent[1]["prompt"][BLOCK:32]
    out, err = capsys.readouterr()
    assert "t.jsonl: 3 requests" in out
    assert "1 events (publish) are not sent" in err


async def test_no_more_are_in_flight_than_was_said(replica, tmp_path):
    lines = rollouts(60)
    assert await run(file_of(lines, tmp_path), "--url", replica.url, "--inflight", "7") == 0
    calls = replica.calls(PATH)
    moves = [(call.at_s, 1) for call in calls] + [(call.answered_s, -1) for call in calls]
    level = most = 0
    for _, by in sorted(moves):
        level += by
        most = max(most, level)
    assert most == 7


@pytest.mark.parametrize(("speed", "step_s"), [(1.0, 0.05), (5.0, 0.01)])
async def test_no_request_goes_out_before_its_time(replica, tmp_path, speed, step_s):
    requests = read(Path(file_of(rollouts(5, step_ms=50), tmp_path))).requests
    options = HttpOptions(replica.url, speed=speed)
    sent = HttpReplay(requests, ["tiny"] * 5, Prompts(BLOCK, 300, 0), options)
    began_s = asyncio.get_running_loop().time()
    await sent.run()
    after_s = [at_s - began_s for at_s in sent.tally.began_s]
    due_s = [number * step_s for number in range(5)]
    assert all(at_s >= least_s - 1e-3 for at_s, least_s in zip(after_s, due_s, strict=True))
    assert sent.tally.answered == 5


async def test_a_plain_mooncake_trace_is_sent(replica, tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, end]}
        for end in (2, 3)
    ]
    assert await run(file_of(lines, tmp_path), "--url", replica.url, "--inflight", "1") == 0
    one, other = (body["prompt"] for body in bodies(replica))
    assert len(one) == len(other) == 1500
    assert one[:1024] == other[:1024]
    assert one[1024:] != other[1024:]


# --- what is seen ---------------------------------------------------------------------------------


async def test_through_rollmux_all_rows_of_the_pure_report_are_there(pair, tmp_path, capsys):
    file = file_of(rollouts(240), tmp_path)
    async with daemon([each.url for each in pair], tmp_path / "daemon.log") as url:
        assert await run(file, "--url", url, "--inflight", "16", "--json") == 0
        found = json.loads(capsys.readouterr().out)["results"][0]
        assert await run(file, "--url", url, "--inflight", "16", "--seed", "1") == 0
        shown = capsys.readouterr().out
    pure = replay(read(Path(file)), "prefix", Options(replicas=2, inflight=16))
    assert found["requests"] == 240
    assert found["router"] == "prefix"
    assert sum(found["per_replica"]) == 240
    assert len(found["per_replica"]) == 2
    assert found["ideal_share"] == pytest.approx(pure.ideal_share)
    assert found["cached_share"] == pytest.approx(pure.cached_share, abs=0.05)
    assert sum(found["decisions"].values()) == 240
    assert found["decisions"]["unmatched"] <= pure.decisions["unmatched"] + 2
    assert found["queried_tokens"] == found["prompt_tokens"] == 240 * 40
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(240 * 20)
    assert found["group_s"]["p90"] >= found["request_s"]["p50"] > 0
    assert found["late_s"] is None
    assert found["curves"]["request_s"]
    rows = [line[:26].strip() for line in shown.splitlines()[2:]]
    for row in ("prompt tokens from cache", "of the ideal", "affinity", "group, p99"):
        assert row in rows


async def test_of_another_server_the_replicas_metrics_tell(pair, tmp_path, capsys):
    """Here the server is a replica itself, and one of those that tell got nothing."""
    file = file_of(rollouts(16), tmp_path)
    words = ["--url", pair[0].url, "--inflight", "1"]
    told = [word for each in pair for word in ("--replica-metrics", each.url)]
    assert await run(file, *words, *told, "--json") == 0
    found = json.loads(capsys.readouterr().out)["results"][0]
    assert found["per_replica"] == [16, 0]
    assert found["cached_share"] == pytest.approx((14 * 32 + 16) / (16 * 40))
    assert found["decisions"] == {}
    assert await run(file, *words) == 0
    shown = capsys.readouterr().out
    assert "prompt tokens from cache" not in shown
    assert "affinity" not in shown
    assert "group, p90" in shown


async def test_requests_of_others_are_told(replica, tmp_path, capsys):
    file = file_of(rollouts(8), tmp_path)
    words = ["--url", replica.url, "--inflight", "1", "--replica-metrics", replica.url]
    assert await run(file, *words) == 0
    assert "others' requests" not in capsys.readouterr().err
    replica.faults.add(PATH, cut=9, nth=3)  # computed for nobody
    assert await run(file, *words) == 1
    assert "others' requests" in capsys.readouterr().err


def test_a_replica_that_was_started_anew_meanwhile_tells_no_share(tmp_path):
    trace = read(Path(file_of(rollouts(1), tmp_path)))
    options = HttpOptions("http://a")
    sent = HttpReplay(trace.requests, ["m"], Prompts(BLOCK, 300, 0), options)
    fleet, before = Fleet("", ("http://a",)), [Counters(500, 100, 5)]
    went_on = seen(trace, sent, trace.requests, options, fleet, before, [Counters(540, 132, 6)])
    assert (went_on.cached_share, went_on.per_replica) == (0.8, [1])
    anew = seen(trace, sent, trace.requests, options, fleet, before, [Counters(40, 32, 1)])
    assert anew.cached_share is None


async def test_failures_are_counted_by_status_and_the_exit_code_is_1(replica, tmp_path, capsys):
    lines = rollouts(12)
    replica.faults.add(PATH, status=503, body=b'{"error": "no\nroom"}', nth=2)
    replica.faults.add(PATH, cut=9, nth=5)
    assert (
        await run(file_of(lines, tmp_path), "--url", replica.url, "--inflight", "1", "--json") == 1
    )
    out, err = capsys.readouterr()
    (found,) = json.loads(out)["results"]
    assert found["requests"] == 10
    assert found["failures"] == {"503": 1, "reset": 1}
    assert found["sent"] == 12
    assert 'failed, 503: {"error": "no room"}' in err


async def test_a_server_that_answers_nothing_more_ends_the_replay(replica, tmp_path, capsys):
    replica.faults.add(PATH, status=500)
    file = file_of(rollouts(1000), tmp_path)
    assert await run(file, "--url", replica.url, "--inflight", "4") == 1
    out, err = capsys.readouterr()
    assert "stopped after 20" in err
    assert "failed: 500" in out
    assert len(replica.calls(PATH)) < 210


async def test_what_was_seen_before_ctrl_c_is_printed(tmp_path):
    file = file_of(rollouts(400), tmp_path)
    async with SimulatedReplica(vocab_size=32_000, step_s=0.01) as slow:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "replay", file, "--url", slow.url),
            *("--inflight", "4", "--json"),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(DEADLINE_S):
            while sum(call.status == 200 for call in slow.calls(PATH)) < 8:
                assert child.returncode is None, await child.communicate()
                await asyncio.sleep(0.05)
            child.send_signal(signal.SIGINT)
            out, err = await child.communicate()
    assert child.returncode == 130
    assert b"Traceback" not in err
    (found,) = json.loads(out)["results"]
    assert 4 <= found["requests"] < 400  # the last four may still have been on their way
    assert found["unanswered"] == found["sent"] - found["requests"] <= 4


# --- what cannot be used --------------------------------------------------------------------------


async def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert await run(*words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


async def test_a_server_that_is_not_there_is_told(replica, tmp_path, capsys):
    replica.refuse()
    assert "is the server up?" in await told(
        capsys, file_of(rollouts(1), tmp_path), "--url", replica.url
    )


async def test_a_key_that_is_wanted_is_told_and_sent(tmp_path, capsys, monkeypatch):
    file = file_of(rollouts(4), tmp_path)
    async with SimulatedReplica(vocab_size=32_000, api_key="of-this-test") as guarded:
        words = [file, "--url", guarded.url, "--inflight", "1"]
        assert "wants a key (401)" in await told(capsys, *words)
        monkeypatch.setenv("REPLAY_KEY", "another")
        said = await told(capsys, *words, "--api-key-env", "REPLAY_KEY")
        assert "refuses this key" in said
        assert "another" not in said
        monkeypatch.setenv("REPLAY_KEY", "of-this-test")
        assert await run(*words, "--api-key-env", "REPLAY_KEY") == 0
        assert "of-this-test" not in "".join(capsys.readouterr())


async def test_models_that_the_server_has_not_are_told(replica, tmp_path, capsys):
    lines = [line | {"model": f"trl-policy-v{number}"} for number, line in enumerate(rollouts(5))]
    file = file_of(lines, tmp_path)
    said = await told(capsys, file, "--url", replica.url)
    assert "has no trl-policy-v0, trl-policy-v1, trl-policy-v2 and 2 more" in said
    assert "it has tiny" in said
    assert "can be one of tiny" in await told(
        capsys, file, "--url", replica.url, "--model", "small"
    )
    assert await run(file, "--url", replica.url, "--inflight", "1", "--model", "tiny") == 0


async def test_an_address_that_is_no_vllm_is_told(replica, tmp_path, capsys):
    said = await told(capsys, file_of(rollouts(1), tmp_path), "--url", f"{replica.url}/vllm")
    assert "/v1/models answers 404" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "gpu1:8000"], "write http://gpu1:8000"),
        (["--url", "http://a", "--router", "prefix"], "--router: is the server's own"),
        (["--url", "http://a", "--step-ms", "8"], "--step-ms: is the server's own"),
        (["--url", "http://a", "--spill-threshold", "8"], "--spill-threshold: is the server's own"),
        (["--url", "http://a", "--inflight", "2", "--speed", "2"], "give one of them"),
        (["--url", "http://a", "--vocab-size", "20"], "--vocab-size"),
        (["--url", "http://a", "--api-key-env", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["--speed", "2"], "--speed: goes with --url only"),
        (["--vocab-size", "500"], "--vocab-size: goes with --url only"),
        (["--replica-metrics", "http://a"], "--replica-metrics: goes with --url only"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(tmp_path, capsys, words, told):
    assert main(["replay", file_of(rollouts(1), tmp_path), *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


async def test_damaged_lines_are_named_and_the_rest_is_sent(replica, tmp_path, capsys):
    lines = [*rollouts(4), ["no", "object"], {"timestamp": 0}]
    file = file_of(lines, tmp_path)
    assert await run(file, "--url", replica.url, "--inflight", "1") == 1
    err = capsys.readouterr().err
    assert "t.jsonl, line 5: is no JSON object" in err
    assert "line 6: " in err
    assert len(replica.calls(PATH)) == 4

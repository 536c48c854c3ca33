"""Pure replay: what it reports is what the policies and the engine model do, and repeats."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import ideal
from benchmarks.replay import SWEPT, Options, Replay, percentiles, replay
from benchmarks.replay_http import VOCABULARY
from benchmarks.trace import Event, Request, Trace, read
from proxy.__main__ import main, parsers
from routing.router import Decision, NoReplica, ReplicaLoad, RouteRequest, RouterSettings, Stateless

BLOCK = 16
TRACES = Path(__file__).parents[3] / "shared" / "traces"
GROUP = 8


def trace_of(requests: Sequence[Request], events: Sequence[Event] = ()) -> Trace:
    return Trace("test", "", BLOCK, list(requests), list(events))


class Ids:
    """Numbers for chained prefixes, as the recorder gives them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, *blocks: object) -> array[int]:
        known = self._known
        prefixes = (blocks[: length + 1] for length in range(len(blocks)))
        return array("q", [known.setdefault(prefix, len(known)) for prefix in prefixes])


def rollouts(steps: int = 6) -> Trace:
    """GRPO's shape: 16 prompts x 8 a step under one template, 135 tokens, replies with a tail, a
    new policy every two steps."""
    ids, drawn, requests, events = Ids(), random.Random(1), [], []
    at_s = 0.0
    for step in range(steps):
        model = f"trl-policy-v{step // 2}"
        if step % 2 == 0:
            events.append(Event(at_s, "publish", model))
        for prompt in range(16):
            blocks = ids.of((model, "template"), *((step, prompt, k) for k in range(8)))
            at_s += 0.4
            for _ in range(GROUP):  # at once, as a trainer sends them
                output = 1 + min(4000, int(drawn.expovariate(1 / 300)))
                requests.append(Request(at_s, 135, output, blocks, model))
    return trace_of(requests, events)


def test_equal_input_and_seed_give_equal_output():
    options = Options(replicas=3, inflight=64, seed=5)
    assert replay(rollouts(), "prefix", options) == replay(rollouts(), "prefix", options)


def test_prefix_routing_is_near_the_ideal_on_rollouts_and_beats_rotation():
    results = {
        router: replay(rollouts(), router, Options(replicas=2))
        for router in ("prefix", "round-robin")
    }
    found = results["prefix"]
    assert found.requests == 6 * 16 * GROUP
    assert found.decisions["unmatched"] == found.requests / GROUP
    assert found.cached_share >= 0.97 * found.ideal_share
    assert found.spread < 0.1
    assert results["round-robin"].decisions == {"rotated": found.requests}
    assert results["round-robin"].cached_share < found.cached_share - 0.05


def test_more_in_flight_is_more_tokens_per_second():
    few, many = (replay(rollouts(), "prefix", Options(inflight=n)) for n in (16, 64))
    assert many.tokens_per_second > 1.5 * few.tokens_per_second
    assert many.seconds < few.seconds


def test_curves_are_those_of_the_same_run():
    options = Options(inflight=64)
    found = replay(rollouts(), "prefix", options)
    curves = found.curves
    assert curves is not None
    assert curves.request_s[89] == pytest.approx(found.request_s.p90, abs=1e-4)
    assert found.group_s is not None
    assert curves.group_s[49] == pytest.approx(found.group_s.p50, abs=1e-4)
    assert max(curves.inflight) == pytest.approx(64, abs=0.5)
    whole = [curves.bin_s] * (len(curves.inflight) - 1)
    widths = [*whole, found.seconds - sum(whole)]
    generated = sum(w * rate for w, rate in zip(widths, curves.tokens_per_second, strict=True))
    assert generated == pytest.approx(found.tokens_per_second * found.seconds, rel=1e-4)


def test_tokens_and_times_are_those_of_the_trace():
    requests = [Request(1.0, 40, 10, array("q", [0, 1, 2])), Request(100.0, 40, 20, array("q"))]
    found = replay(trace_of(requests), "least-loaded", Options(replicas=1))
    # A step is 8 ms and 20 µs a sequence; the prompts take 40 times 20 µs.
    first_s, second_s = 9 * 0.00802 + 0.0008, 19 * 0.00802 + 0.0008
    assert found.request_s.p50 == pytest.approx(first_s)
    assert found.request_s.p99 == pytest.approx(second_s)
    assert found.seconds == pytest.approx(99 + second_s)
    assert found.tokens_per_second == pytest.approx(30 / found.seconds)
    assert found.group_s is None


def test_a_group_takes_as_long_as_its_slowest():
    ids = array("q", [0, 1])
    requests = [Request(1.0 + k, 20, output, ids) for k, output in enumerate((500, 10, 20))]
    found = replay(trace_of(requests), "prefix", Options(replicas=1))
    assert found.group_s is not None
    assert found.group_s.p50 == found.seconds == found.request_s.p99


class Watching(Stateless):
    """Least loaded, and what it saw."""

    name = "watching"

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.most = 0
        self.prompts: list[list[int]] = []
        self.forgotten: list[str] = []

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        self.prompts.append(list(request.prompt))
        self.most = max(self.most, sum(each.inflight for each in candidates) + request.weight)
        return Decision(min(candidates, key=lambda each: each.inflight).id, "watched")

    def forget_adapter(self, model: str) -> None:
        self.forgotten.append(model)

    def forget_all(self) -> None:
        self.forgotten.append("all")


def run(trace: Trace, router: Watching, options: Options):
    return Replay(trace, router, options, lambda sent: None).run()


def test_no_more_are_in_flight_than_was_said():
    router = Watching()
    requests = [Request(0.0, 40, 30, array("q"), n=1 + k % 3) for k in range(100)]
    run(trace_of(requests), router, Options(inflight=10))
    assert router.most == 10


def test_a_request_of_more_than_the_limit_goes_alone():
    router = Watching()
    requests = [Request(0.0, 40, 8 * n, array("q"), n=n) for n in (1, 8, 1)]
    found = run(trace_of(requests), router, Options(inflight=4))
    assert router.most == 8
    assert found.tokens_per_second * found.seconds == pytest.approx(80)


def test_a_policy_sees_the_prompts_part_where_they_did():
    router = Watching()
    requests = [
        Request(0.0, 2 * BLOCK, 1, array("q", [0, 1])),
        Request(1.0, 2 * BLOCK + 5, 1, array("q", [0, 1, 2])),
        Request(2.0, 5, 1, array("q", [7])),
    ]
    run(trace_of(requests), router, Options())
    assert router.prompts == [[0, 0, 1, 0], [0, 0, 1, 0, 2], [7]]


def test_events_reach_policy_and_engines():
    router = Watching()
    requests = [Request(at_s, 40, 2, array("q", [0, 1, 2]), "v1") for at_s in (1.0, 3.0, 5.0)]
    events = [
        Event(0.5, "publish", "v1"),
        Event(2.0, "pause", real=False, clear_cache=True),
        Event(2.5, "resume"),
        Event(4.0, "pause", real=True, clear_cache=True),
        Event(8.0, "resume", real=True),
        Event(9.0, "unload", "v1"),
    ]
    found = run(trace_of(requests, events), router, Options(replicas=1))
    assert router.forgotten == ["all", "v1"]
    assert found.cached_share == pytest.approx(32 / 120)  # the pause cleared it for the third
    assert found.request_s.p99 > 3.0  # it waited for the resume


@pytest.mark.parametrize("inflight", [None, 1])
def test_a_trace_that_ends_inside_a_pause_ends(inflight):
    requests = [Request(at_s, 40, 50, array("q")) for at_s in (0.0, 0.1, 2.0)]
    events = [Event(0.2, "pause", real=True)]
    found = replay(trace_of(requests, events), "prefix", Options(inflight=inflight))
    assert found.requests == 3


def test_failed_requests_are_left_out():
    requests = [Request(0.0, 40, 5, array("q"), ok=ok) for ok in (True, False, True)]
    assert replay(trace_of(requests), "prefix", Options()).requests == 2


# --- the ideal ------------------------------------------------------------------------------------


def cached(*prompts: tuple[int, Sequence[object]], replicas: int) -> int:
    """In tokens; a prompt is its length and its blocks."""
    ids = Ids()
    requests = [Request(0.0, length, 1, ids.of(*blocks)) for length, blocks in prompts]
    return ideal.cached_tokens(requests, BLOCK, replicas)


def test_a_groups_prompt_is_computed_once_whatever_the_replicas():
    assert cached(*[(40, "abc")] * 8, replicas=4) == 7 * 32


def test_a_common_prefix_is_computed_once_per_replica():
    prompts = [(40, f"t{end}{end}") for end in "abcdef"]
    assert cached(*prompts, replicas=2) == (6 - 2) * BLOCK
    assert cached(*prompts, replicas=9) == 0


def test_a_conversation_that_goes_on_is_no_parting():
    turns = [(40, "abC"), (40 + 32, "abcdE"), (40 + 64, "abcdefG")]
    assert cached(*turns, replicas=3) == (2 + 4) * BLOCK


def test_the_block_that_ends_a_prompt_is_always_computed():
    assert cached(*[(32, "ab")] * 3, replicas=1) == 2 * BLOCK


@hypothesis.settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=12), st.booleans())
def test_one_replica_with_time_between_requests_has_the_ideal(prompts, whole):
    ids = Ids()
    requests = [
        Request(10.0 * number, max(1, len(p) * BLOCK - (0 if whole else 3)), 1, ids.of(*p))
        for number, p in enumerate(prompts)
    ]
    # As a trace has them: the block that is not whole is another than the whole one.
    if not whole:
        requests = [
            Request(r.at_s, r.prompt_tokens, 1, ids.of(*p[:-1], f"part {p[-1:]}") if p else r.ids)
            for r, p in zip(requests, prompts, strict=True)
        ]
    found = replay(trace_of(requests), "prefix", Options(replicas=1))
    assert found.cached_share == pytest.approx(found.ideal_share)


def test_a_prompt_that_comes_again_much_later_is_another_group():
    one, other = (Request(0.0, 40, 1, array("q", [k])) for k in (1, 2))
    numbers = ideal.groups([one, other, one, *[other] * ideal.GROUP_GAP, one])
    assert numbers[:3] == [0, 1, 0]
    assert set(numbers[3:-1]) == {1}
    assert numbers[-1] == 2


def test_percentiles_are_by_nearest_rank():
    found = percentiles([float(n) for n in range(1, 101)])
    assert (found.p50, found.p90, found.p99) == (50, 90, 99)
    alone = percentiles([3.0])
    assert (alone.p50, alone.p90, alone.p99) == (3, 3, 3)


# --- the command ----------------------------------------------------------------------------------


def file_of(trace: Trace, file: Path, *more: str) -> Path:
    lines = [json.dumps({"rollmux_trace": 1})]
    lines += [
        json.dumps({"event": e.kind, "timestamp": e.at_s * 1e3, "model": e.model})
        for e in trace.events
    ]
    for number, r in enumerate(trace.requests):
        line = {
            "timestamp": r.at_s * 1e3,
            "input_length": r.prompt_tokens,
            "output_length": r.output_tokens,
            "hash_ids": list(r.ids),
            "block_size": BLOCK,
            "model": r.model,
            "replica": f"r{number % 3}",
            "status": 200,
        }
        lines.append(json.dumps(line))
    file.write_text("".join(f"{line}\n" for line in [*lines, *more]))
    return file


def test_the_table_has_a_column_for_each_policy(tmp_path, capsys):
    file = file_of(rollouts(steps=1), tmp_path / "t.jsonl")
    assert main(["replay", str(file), "--router", "prefix", "--router", "least-loaded"]) == 0
    out, err = capsys.readouterr()
    assert "128 requests; simulated on 3 replicas, timing as recorded" in out
    rows = {line[:26].strip(): line[26:].split() for line in out.splitlines()[2:]}
    assert rows[""] == ["prefix", "least-loaded"]
    assert rows["unmatched"] == ["12.5%", "100.0%"]
    assert "group, p99" in rows
    assert err == ""


def test_json_has_all_that_a_later_reader_needs(tmp_path, capsys):
    file = file_of(rollouts(steps=1), tmp_path / "t.jsonl")
    words = ["replay", str(file), "--json", "--replicas", "2", "--inflight", "32", "--seed", "3"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"] | {"inflight": 32, "replicas": 2, "seed": 3} == found["options"]
    assert len(found["trace_blake3"]) == 16
    (result,) = found["results"]
    assert sum(result["per_replica"]) == result["requests"] == 128
    assert result["group_s"]["p90"] >= result["request_s"]["p50"]


def test_damaged_lines_are_named_and_the_exit_code_is_1(tmp_path, capsys):
    trace = rollouts(steps=1)
    file = file_of(trace, tmp_path / "t.jsonl", "{", *["nonsense"] * 30)
    assert main(["replay", str(file), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["damaged_lines"] == 31
    assert json.loads(out)["results"][0]["requests"] == 128
    assert "t.jsonl, line 131: is no JSON" in err
    assert "31 damaged lines are left out" in err
    assert len(err.splitlines()) < 25


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--router", "prefx"], "did you mean prefix?"),
        (["--replicas", "0"], "out of range"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(tmp_path, capsys, words, told):
    file = file_of(rollouts(steps=1), tmp_path / "t.jsonl")
    try:
        code = main(["replay", str(file), *words])
    except SystemExit as left:
        code = left.code
    assert code == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"])
def test_published_traces_replay(name):
    if not (TRACES / name).is_file():
        pytest.skip(f"{name} is not beside this checkout")
    trace = read(TRACES / name)
    assert trace.faults == []
    trace.requests = trace.requests[:2000]  # enough for all that a whole one has
    found = replay(trace, "prefix", Options(replicas=4))
    assert found.requests == 2000
    assert found.cached_share > 0
    assert sum(found.per_replica) == 2000


def test_several_values_are_a_sweep_of_all_their_combinations(capsys):
    words = [
        "replay",
        "--workload",
        "grpo:steps=2",
        "--router",
        "prefix",
        "--router",
        "round-robin",
    ]
    words += ["--replicas", "1,2,3", "--inflight", "16,64"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    results = {
        (r["router"], r["options"]["replicas"], r["options"]["inflight"]): r
        for r in report["results"]
    }
    assert len(results) == len(report["results"]) == 2 * 3 * 2
    assert "replicas" not in report["options"]
    assert report["options"]["seed"] == 0
    for (_, replicas, _), result in results.items():
        assert len(result["per_replica"]) == replicas
    alone = [*words[:-4], "--replicas", "2", "--inflight", "16", "--json"]
    assert main(alone) == 0
    for result in json.loads(capsys.readouterr().out)["results"]:
        assert result == results[result["router"], 2, 16]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert sum("replicas 3, in flight 64" in line for line in shown.splitlines()) == 2


def test_speed_and_size_of_the_replicas_are_options(capsys):
    def seconds(*words: str) -> list[float]:
        assert main(["replay", "--workload", "grpo:steps=1,inflight=64", "--json", *words]) == 0
        return [r["seconds"] for r in json.loads(capsys.readouterr().out)["results"]]

    (usual,) = seconds()
    slow, quick = seconds("--step-ms", "16,4")
    assert quick < 0.7 * usual < usual < 0.7 * slow
    assert seconds("--sequence-us", "200")[0] > usual
    assert seconds("--prefill-us", "2000")[0] > usual
    assert seconds("--max-num-seqs", "4")[0] > 2 * usual


@pytest.mark.parametrize("values", ["1,x", "1,,2", "0", "1,0", ""])
def test_values_that_are_none_are_bad_usage(values: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--workload", "grpo", "--replicas", values])
    assert ended.value.code == 2
    assert "--replicas" in capsys.readouterr().err


def test_the_help_names_the_defaults_that_are_used():
    shown = {a.dest: a.help for a in parsers()[1]["replay"]._actions}
    usual = asdict(Options())
    for name in SWEPT.keys() - {"replicas", "inflight"}:  # theirs are the trace's
        assert f"(default: {usual[name]:.10g})" in shown[name], name
    assert f"(default: {VOCABULARY})" in shown["vocab_size"]

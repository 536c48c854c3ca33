"""The command that puts a trace into a trainer's loop; what the loop does: test_training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from proxy.__main__ import main

LOOP = ["replay", "--workload", "grpo:steps=4,reply=200,longest=800", "--samples-per-step", "64"]
SHORT = ["--inflight", "64", "--queue", "128", "--sync-s", "2", "--steps", "12"]


def report(capsys, *words: str):
    assert main([*LOOP, *SHORT, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_who_waits_stands_in_the_table_with_what_lazy_pause_saves(capsys):
    assert main([*LOOP, *SHORT, "--trainer-step-s", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line[:26].strip(): re.split(r"\s{2,}", line[26:].strip()) for line in lines[2:]}
    assert cells[""] == ["prefix, eager", "prefix, lazy"]
    assert cells["waits"] == ["trainer", "trainer"]
    none, saved = cells["lazy pause saves"]
    assert none == "-"
    assert float(saved.rstrip("%")) > 1


def test_values_with_commas_are_a_sweep(capsys):
    results = report(capsys, "--trainer-step-s", "0.1,20", "--replicas", "1,2")["results"]
    assert len(results) == 2 * 2 * 2
    for result in results:
        slow = result["options"]["step_s"] == 20
        assert result["waits"] == ("generation" if slow else "trainer")
        assert len(result["per_replica"]) == result["options"]["replicas"]
        assert (result["lazy_saves_share"] is None) == (result["pause"] == "eager")
        assert result["options"]["lazy"] == (result["pause"] == "lazy")


def test_one_pause_and_several_policies(capsys):
    words = ["--trainer-step-s", "1", "--pause", "lazy", "--router", "prefix"]
    results = report(capsys, *words, "--router", "round-robin")["results"]
    assert [r["router"] for r in results] == ["prefix, lazy", "round-robin, lazy"]
    assert results[0]["cached_share"] > results[1]["cached_share"]


def test_settings_reach_the_loop_and_the_replicas(capsys):
    words = ["--trainer-step-s", "1", "--pause", "lazy", "--sync-every", "2", "--max-staleness"]
    (result,) = report(capsys, *words, "3", "--step-ms", "4")["results"]
    expected = {"sync_every": 2, "max_staleness": 3, "step_ms": 4, "queue": 128, "steps": 12}
    assert expected.items() <= result["options"].items()


def test_without_a_limit_as_many_are_in_flight_as_trl_would_allow(tmp_path: Path, capsys):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 20, "output_length": 9, "hash_ids": [1]}
    trace.write_text(json.dumps(line) + "\n")
    words = ["--trainer-step-s", "1", "--samples-per-step", "8", "--steps", "2", "--json"]
    assert main(["replay", str(trace), *words]) == 0
    for result in json.loads(capsys.readouterr().out)["results"]:
        assert result["options"]["inflight"] == 4 * 8


def test_a_sweep_has_a_page(tmp_path: Path, capsys):
    page = tmp_path / "page.html"
    main([*LOOP, *SHORT, "--trainer-step-s", "0.1,20", "--html", str(page)])
    text = page.read_text()
    assert "prefix, lazy" in text
    assert "queue" in text
    assert "<svg" in text
    assert "<h2>lazy saves, %" in text  # which the eager runs have not


def test_a_value_given_twice_is_one_value(tmp_path: Path, capsys):
    page = tmp_path / "page.html"
    twice = ["--trainer-step-s", "1", "--queue", "64,64", "--html", str(page)]
    assert main([*LOOP, *SHORT, *twice]) == 2
    assert "give several values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--queue", "8"], "--queue: goes with --trainer-step-s only"),
        (["--pause", "lazy"], "--pause: goes with --trainer-step-s only"),
        (["--trainer-step-s", "1"], "--samples-per-step: --trainer-step-s needs it"),
        (["--trainer-step-s", "1", "--samples-per-step", "8", "--html", "x"], "give several"),
        (["--trainer-step-s", "1", "--url", "http://127.0.0.1:1"], "simulated, not sent"),
        (["--trainer-step-s", "1", "--samples-per-step", "8", "--router", "no"], "--router: "),
    ],
)
def test_what_cannot_be_is_bad_usage(words: list[str], told: str, capsys):
    assert main(["replay", "--workload", "grpo:steps=1", *words]) == 2
    assert told in capsys.readouterr().err

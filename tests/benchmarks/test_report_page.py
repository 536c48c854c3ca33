"""The page says what the JSON says, needs nothing else, and names in it stay text."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks import report_page
from benchmarks.replay import Options, replay
from benchmarks.replica import SimulatedReplica
from proxy.__main__ import main
from tests.benchmarks.test_replay import file_of, rollouts

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
WITHOUT_END = {"meta", "link"}


class Reader(HTMLParser):
    """Tables by their label, headings, attributes by name; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.values: list[tuple[str, str | None]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._label = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.values += attrs
        if tag not in WITHOUT_END:
            self.open.append(tag)
        if tag == "div" and dict(attrs).get("role") == "region":
            self._label = dict(attrs)["aria-label"].removesuffix(", table")
            self.tables[self._label] = []
        if tag == "tr":
            self.tables[self._label].append([])
        if tag in ("th", "td"):
            self.tables[self._label][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.values += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("th", "td"):
            self.tables[self._label][-1][-1] += data


def written(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict, str]:
    """The report as JSON, and as a page."""
    file = file_of(rollouts(steps=2), tmp_path / "t.jsonl")
    page = tmp_path / "report.html"
    assert main(["replay", str(file), "--json", "--html", str(page), *words]) == 0
    return json.loads(capsys.readouterr().out), page.read_text("utf-8")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_numbers_are_those_of_the_json(tmp_path, capsys):
    words = ["--router", "prefix", "--router", "round-robin", "--inflight", "64"]
    report, html = written(tmp_path, capsys, *words)
    page = Reader(html)
    first, second = report["results"]
    result = {row[0]: row[1:] for row in page.tables["Result"]}
    assert result[""] == ["prefix", "round-robin"]
    cached = [f"{r['cached_share']:.1%}" for r in report["results"]]
    assert result["prompt tokens from cache"] == cached
    for title, key in (("Time of a request", "request_s"), ("Time of a group", "group_s")):
        head, *rows = page.tables[title]
        assert head[1:] == ["prefix", "round-robin"]
        assert [number(row[0]) for row in rows] == list(range(1, 101))
        for column, each in ((1, first), (2, second)):
            assert [number(row[column]) for row in rows] == each["curves"][key]
    for title, key in (
        ("In flight, over time", "inflight"),
        ("Generated, over time", "tokens_per_second"),
    ):
        head, *rows = page.tables[title]
        longest = max(report["results"], key=lambda r: len(r["curves"][key]))["curves"]
        assert [number(row[0]) for row in rows] == [
            k * longest["bin_s"] for k in range(len(longest[key]))
        ]
        for column, each in ((1, first), (2, second)):
            found = [number(row[column]) for row in rows if row[column]]
            assert found == each["curves"][key]
    for shown in (report["trace"], report["trace_blake3"], report["rollmux"], "<dd>64</dd>"):
        assert shown in html
    for result in report["results"]:
        assert f"{result['ideal_share']:.1%}" in html
        assert all(f"<span>{requests:,}</span>" in html for requests in result["per_replica"])
    assert f"affinity {first['decisions']['affinity'] / first['requests']:.1%}" in html


def test_bars_and_lines_are_as_long_as_the_numbers(tmp_path, capsys):
    report, html = written(tmp_path, capsys, "--replicas", "2")
    (result,) = report["results"]
    (bar,) = re.findall(r"Prompt tokens from cache.*?<rect[^>]* width=\"([^\"]*)\"", html)
    assert float(bar) == pytest.approx(report_page.WIDTH * result["cached_share"], abs=0.06)
    why = html[html.index("Why it went") : html.index("Requests of each replica")]
    parts = re.findall(r'<rect class="c(\d)" x="([^"]*)" y="0" width="([^"]*)"', why)
    place = 0.0
    words = [word for word in report_page.FIRST if word in result["decisions"]]
    assert len(words) > 1
    for (colour, x, width), word in zip(parts, words, strict=True):
        share = result["decisions"][word] / result["requests"]
        assert float(x) == pytest.approx(place, abs=0.11)
        assert float(width) == pytest.approx(report_page.WIDTH * share, abs=0.06)
        assert int(colour) == report_page.FIRST.index(word)
        place += float(width)
    lines = re.findall(r'<polyline[^>]* points="([^"]*)"', html)
    points = [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]
    request = points[0]
    assert len(request) == 100
    ends = (report_page.HEIGHT - report_page.BOTTOM, report_page.TOP)
    assert request[-1][1] == pytest.approx(ends[1], abs=0.1)
    assert request[0][1] == pytest.approx(ends[0] - 0.01 * (ends[0] - ends[1]), abs=0.1)
    seconds = result["curves"]["request_s"]
    begin = report_page.LEFT
    scale = (request[-1][0] - begin) / seconds[-1]
    assert [x for x, _ in request] == pytest.approx([begin + s * scale for s in seconds], abs=0.2)


def test_page_needs_nothing_else_and_runs_nothing(tmp_path, capsys):
    _, html = written(tmp_path, capsys)
    page = Reader(html)
    assert not page.tags & {"script", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for name, _ in page.values if name.startswith("on") or name == "style"]
    for name, value in page.values:
        if name in ("href", "src", "action", "data", "xlink:href"):
            assert value == "data:,"
    assert html.count('role="region"') == html.count('tabindex="0"') == len(page.tables) == 5
    assert "url(" not in html
    assert "@import" not in html
    assert "http:" not in html
    assert "https:" not in html
    policy = next(v for _, v in page.values if v and v.startswith("default-src"))
    assert "default-src 'none'; style-src 'sha256-" in policy


def test_names_of_a_trace_and_of_policies_are_text():
    trace = rollouts(steps=1)
    result = replay(trace, "prefix", Options())
    assert result.curves is not None
    curves = {
        "request_s": result.curves.request_s, "group_s": [], "bin_s": 1.0,
        "inflight": result.curves.inflight, "tokens_per_second": [1.0],
    }  # fmt: skip
    report = {
        "rollmux": MARKUP,
        "trace": MARKUP,
        "options": {MARKUP: MARKUP},
        "results": [
            {
                "router": MARKUP,
                "decisions": {MARKUP: 3},
                "cached_share": 0.5,
                "ideal_share": 0.6,
                "per_replica": [3] * replicas,
                "tokens_per_second": 7.0,
                "curves": curves,
            }
            for replicas in (2, 40)
        ],
    }
    html = report_page.page(report, MARKUP, [("", [MARKUP] * 2), (MARKUP, [MARKUP] * 2)])
    page = Reader(html)
    assert not page.tags & {"img", "script"}
    assert "<img" not in html
    assert page.tables["Result"][1] == [MARKUP] * 3
    assert "onerror" not in [name for name, _ in page.values]


def test_more_replicas_than_bars_are_a_line(tmp_path, capsys):
    report, html = written(tmp_path, capsys, "--replicas", "30")
    (result,) = report["results"]
    head, *rows = Reader(html).tables["Requests of each replica, most first"]
    assert head == ["place", "prefix"]
    assert [number(row[1]) for row in rows] == sorted(result["per_replica"], reverse=True)


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (100, [0, 20, 40, 60, 80, 100]),
        (101, [0, 50, 100, 150]),
        (0.013, [0, 0.005, 0.01, 0.015]),
    ],
)
def test_ticks_are_round_and_reach_the_top(top, ticks):
    assert report_page.ticks(top) == ticks


def test_a_page_that_cannot_be_written_is_told(tmp_path, capsys):
    file = file_of(rollouts(steps=1), tmp_path / "t.jsonl")
    assert main(["replay", str(file), "--html", str(tmp_path / "none" / "report.html")]) == 2
    out, err = capsys.readouterr()
    assert "its folder is not there" in err
    assert out == ""
    assert main(["replay", str(file), "--html", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "prompt tokens from cache" in out, "what was found is lost"
    assert f"{tmp_path}: Is a directory" in err
    assert len(err.splitlines()) == 1


def test_a_sweep_is_a_line_over_what_was_swept():
    trace = rollouts(steps=2)
    results = []
    for router in ("prefix", "round-robin"):
        for inflight in (64, 16):
            options = Options(inflight=inflight)
            result = asdict(replay(trace, router, options))
            results.append(result | {"options": asdict(options), "waits": "trainer"})
    report = {"rollmux": "1", "trace": "t", "options": {}, "results": results}
    html = report_page.page(report, "t", [("", ["prefix"]), ("requests", ["1"])])
    tables = Reader(html).tables
    assert set(tables) >= {"cached, %", "tokens per second", "request, p90, s", "group, p90, s"}
    assert "requests" not in tables, "a figure that is the same everywhere"
    assert "In flight, over time" not in tables
    for title, figure in (
        ("tokens per second", lambda r: r["tokens_per_second"]),
        ("group, p90, s", lambda r: r["group_s"]["p90"]),
        ("cached, %", lambda r: 100 * r["cached_share"]),
    ):
        head, *rows = tables[title]
        assert head == ["in flight", "prefix", "round-robin"]
        values = [figure(result) for result in results]
        expected = [16, values[1], values[3]], [64, values[0], values[2]]
        for row, numbers in zip(rows, expected, strict=True):
            assert [number(cell) for cell in row] == pytest.approx(numbers)


def test_two_swept_options_are_told_apart():
    results = [
        {"router": "prefix", "options": {"replicas": n, "seed": k}, "seconds": 10 * n + k}
        for n in (1, 2)
        for k in (3, 4)
    ]
    report = {"rollmux": "1", "trace": "t", "options": {}, "results": results}
    html = report_page.page(report, "t", [("", ["prefix"])])
    tables = Reader(html).tables
    assert tables["seconds, by replicas"] == [
        ["replicas", "prefix, seed 3", "prefix, seed 4"], ["1", "13", "14"], ["2", "23", "24"],
    ]  # fmt: skip
    assert tables["seconds, by seed"][0] == ["seed", "prefix, replicas 1", "prefix, replicas 2"]


async def test_of_a_server_what_it_does_not_tell_is_left_out(tmp_path, capsys):
    """It is no rollmux: who answered, why, and what caches served is not known."""
    file = file_of(rollouts(steps=1), tmp_path / "t.jsonl")
    page = tmp_path / "report.html"
    async with SimulatedReplica(max_model_len=8192, vocab_size=32_000) as replica:
        words = ["replay", str(file), "--url", replica.url, "--inflight", "64", "--json"]
        words += ["--model", "tiny", "--html", str(page)]
        assert await asyncio.to_thread(main, words) == 0
        report = json.loads(capsys.readouterr().out)
        html = page.read_text("utf-8")
        found = Reader(html)
        assert found.tables["Result"][0] == ["", replica.url]
        times = [number(row[1]) for row in found.tables["Time of a request"][1:]]
        assert times == report["results"][0]["curves"]["request_s"]
        assert "In flight, over time" in found.tables
        for title in ("Prompt tokens from cache", "Why it went", "Requests of each replica"):
            assert title not in html
        replica.faults.add("*", status=400, body=b"{}")
        replica.faults.add("/v1/models", status=200, body=b'{"data": [{"id": "tiny"}]}')
        assert await asyncio.to_thread(main, words) == 1
    found = Reader(page.read_text("utf-8"))
    assert list(found.tables) == ["Result"]
    assert ["failed: 400", "128"] in found.tables["Result"]


def test_a_page_is_written_though_nobody_reads_the_report(tmp_path):
    file = file_of(rollouts(steps=1), tmp_path / "t.jsonl")
    page = tmp_path / "report.html"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        subprocess.run(
            [sys.executable, "-m", "proxy", "replay", str(file), "--html", str(page)],
            stdout=writer,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert "prompt tokens from cache" in page.read_text("utf-8")

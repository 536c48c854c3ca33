"""The report of ``rollmux replay`` as one HTML page that needs nothing else, by ``--html PATH``.

No script, no font, no address: it opens from a disk, and its own policy would stop anything that a
trace's names put in. Plots are SVG drawn here; the numbers behind each are a table beside it.
It takes the report as ``--json`` prints it, and the table as the terminal shows it. Results that
have ``options`` of their own, in which they differ, are points of a sweep: a line over the swept
number for each of their figures, in place of the plots of single runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from string import Template
from typing import Any, Final

from proxy.page import hash_of
from proxy.settings import SettingsError

HTML: Final = (Path(__file__).parent / "report_page.html").read_bytes()

WIDTH, HEIGHT = 400, 220
"""Of a plot, about its size on a phone, where its text is 11 to 13 dots high then."""
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 10, 38
TICKS = 5
COLOURS, DASHES = 6, 4
"""``report_page.html`` has them. Twelve lines look unlike; who sees no colours can tell four."""
MOST_WIDER = 4
"""Lines that lie on each other are seen all the same: those below are wider."""
MOST_BARS = 16
"""Replicas with a bar each; more are a line."""
TALL = 20
"""Rows of a table that is not scrolled."""

FIRST = ("affinity", "spilled", "unmatched")
"""Of the words of decisions, in this order; then those of other policies."""

Points = Sequence[tuple[float, float]]
Rows = Sequence[tuple[str, Sequence[str]]]
"""Of the terminal's table: name and cells, the first row is the head."""


def check(path: str | None) -> None:
    """Before any work.

    :raises SettingsError: it will not be written there.
    """
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise SettingsError(f"--html {path}: its folder is not there; make it first")


def write(path: str | None, report: Mapping[str, Any], heading: str, rows: Rows) -> bool:
    """Nothing without a path. False if that failed, which is told then."""
    if path is None:
        return True
    try:
        Path(path).write_text(page(report, heading, rows), "utf-8")
    except OSError as exc:
        print(f"rollmux replay: {path}: {exc.strerror}", file=sys.stderr)
        return False
    return True


def page(report: Mapping[str, Any], heading: str, rows: Rows) -> str:
    """The whole document."""
    results = report["results"]
    swept = _swept(results)
    plots = _sweeps(results, swept) if swept else _plots(results)
    main = [_what(report), _summary(rows), '<div class="plots">', *plots]
    return Template(HTML.decode()).substitute(
        title=f"Replay of {escape(str(report['trace']))}",
        subtitle=escape(heading),
        style_hash=hash_of("style", HTML),
        main="\n".join([*main, "</div>"]),
    )


def reasons(seen: Iterable[str]) -> list[str]:
    """The words of decisions that were seen, and those of the default policy before them."""
    return [*FIRST, *sorted(set(seen) - set(FIRST))]


def _what(report: Mapping[str, Any]) -> str:
    """What was replayed: all that is one value, whatever it is called."""
    given = {**report, **report["options"]}
    pairs = [
        f"<div><dt>{escape(_words(name))}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in given.items()
        if not isinstance(value, list | dict)
    ]
    return f'<section class="wide"><h2>What was replayed</h2><dl>{"".join(pairs)}</dl></section>'


def _value(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _summary(rows: Rows) -> str:
    (corner, names), *body = rows
    table = _table([corner, *names], [[name, *cells] for name, cells in body], "Result")
    return f'<section class="wide"><h2>Result</h2>{table}</section>'


def _plots(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Those for which there are numbers: a server does not tell all that a simulation does."""
    told = [(k, r) for k, r in enumerate(results) if r["cached_share"] is not None]
    if told:
        yield _bars(
            "Prompt tokens from cache",
            [
                (
                    _name(r),
                    [Part(r["cached_share"], k, f"{r['cached_share']:.1%}{_ideal(r)}")],
                    r["ideal_share"],
                )
                for k, r in told
            ],
            top=1.0,
            note="The upright mark is the ideal: what caches without bound could serve.",
        )
    yield _decisions([r for r in results if r["decisions"]])
    yield _replicas([r for r in results if r["per_replica"]])
    rates = [r["tokens_per_second"] for r in results]
    yield _bars(
        "Generated tokens per second",
        [
            (_name(r), [Part(rate, k, f"{rate:,.0f}")], None)
            for k, (r, rate) in enumerate(zip(results, rates, strict=True))
        ],
        top=max(rates),
    )
    for key, title in (("request_s", "Time of a request"), ("group_s", "Time of a group")):
        yield _lines(
            title, Axis("took", "s"), Axis("that took no longer", "%"),
            _curves(results, key, _shares), by_y=True,
        )  # fmt: skip
    for key, title, unit in (
        ("inflight", "In flight, over time", "rollouts"),
        ("tokens_per_second", "Generated, over time", "tokens per second"),
    ):
        yield _lines(
            title, Axis("since the first request", "s"), Axis(unit),
            _curves(results, key, _bins), held=True,
        )  # fmt: skip


def _name(result: Mapping[str, Any]) -> str:
    return str(result["router"] or result["server"])


def _ideal(result: Mapping[str, Any]) -> str:
    return "" if result["ideal_share"] is None else f", ideal {result['ideal_share']:.1%}"


def _swept(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options in which results differ, where all of them have a number there."""
    options = [result.get("options", {}) for result in results]
    names = [name for name in options[0] if all(_is_number(each.get(name)) for each in options)]
    return [name for name in names if len({each[name] for each in options}) > 1]


def _sweeps(results: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> Iterator[str]:
    """A plot for each figure that is not the same everywhere, over each swept option."""
    figures = [_figures(result) for result in results]
    for option in swept:
        others = [name for name in swept if name != option]
        for figure in dict.fromkeys(each for found in figures for each in found):
            lines: dict[str, list[tuple[float, float]]] = {}
            for result, found in zip(results, figures, strict=True):
                if figure in found:
                    rest = [f"{_words(name)} {result['options'][name]:,}" for name in others]
                    line = lines.setdefault(", ".join([_name(result), *rest]), [])
                    line.append((result["options"][option], found[figure]))
            if len({value for points in lines.values() for _, value in points}) > 1:
                title = f"{figure}, by {_words(option)}" if others else str(figure)
                series = [(name, sorted(points)) for name, points in lines.items()]
                yield _lines(title, Axis(_words(option)), figure, series, dots=True)


def _figures(result: Mapping[str, Any]) -> dict[Axis, float]:
    """All that is a number; of percentiles the 90th."""
    found: dict[Axis, float] = {}
    for key, value in result.items():
        name, value = (key, value) if _is_number(value) else (f"{key}, p90", _p90(value))
        if value is None:
            continue
        for suffix, unit, factor in (("_share", "%", 100), ("_s", "s", 1), ("", "", 1)):
            if key.endswith(suffix):
                label = name.replace(key, key.removesuffix(suffix))
                found[Axis(_words(label), unit)] = factor * value
                break
    return found


def _p90(value: object) -> float | None:
    found = value.get("p90") if isinstance(value, Mapping) else None
    return found if _is_number(found) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("inflight", "in flight")


def _curves(
    results: Sequence[Mapping[str, Any]],
    key: str,
    points: Callable[[Sequence[float], float], Points],
) -> list[tuple[str, Points]]:
    found = [(_name(r), r["curves"]) for r in results]
    return [(name, points(c[key], c["bin_s"])) for name, c in found if c and c[key]]


def _shares(seconds: Sequence[float], _: float) -> Points:
    return [(at_s, 100 * (k + 1) / len(seconds)) for k, at_s in enumerate(seconds)]


def _bins(means: Sequence[float], bin_s: float) -> Points:
    return [(k * bin_s, mean) for k, mean in enumerate(means)]


# --- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Of one bar."""

    value: float
    colour: int
    text: str


Bar = tuple[str, Sequence[Part], float | None]
"""Its name, its parts end to end, and where a mark is."""


def _bars(
    title: str, bars: Sequence[Bar], *, top: float, note: str = "", legend: Sequence[str] = ()
) -> str:
    """What a bar says is text beside it, so it needs no table. An empty string without any."""
    if not bars:
        return ""
    scale = WIDTH / top if top else 0.0
    items = []
    for name, parts, mark in bars:
        edges = accumulate((part.value for part in parts), initial=0.0)
        drawn = [
            f'<rect class="c{part.colour % COLOURS}" x="{edge * scale:.1f}" y="0" '
            f'width="{part.value * scale:.1f}" height="12"/>'
            for edge, part in zip(edges, parts, strict=False)
        ]
        if mark is not None:
            at = min(max(mark * scale, 2), WIDTH - 2)
            drawn.append(f'<path class="mark" d="M{at:.1f} 0V12"/>')
        text = " · ".join(part.text for part in parts)
        items.append(
            f'<li><div class="top"><span>{escape(name)}</span><span>{escape(text)}</span></div>'
            f'<svg class="bar" viewBox="0 0 {WIDTH} 12" preserveAspectRatio="none" '
            f'aria-hidden="true">{"".join(drawn)}</svg></li>'
        )
    below = f'<p class="soft small">{escape(note)}</p>' if note else ""
    if legend:
        keys = "".join(_key(name, number, "rect") for number, name in enumerate(legend))
        below += f'<ul class="legend" aria-hidden="true">{keys}</ul>'
    return f"<section><h2>{escape(title)}</h2><ul>{''.join(items)}</ul>{below}</section>"


def _decisions(results: Sequence[Mapping[str, Any]]) -> str:
    words = reasons(word for result in results for word in result["decisions"])
    bars: list[Bar] = []
    for result in results:
        found = result["decisions"]
        total = sum(found.values())
        parts = [
            Part(found[word] / total, number, f"{word} {found[word] / total:.1%}")
            for number, word in enumerate(words)
            if found.get(word)
        ]
        bars.append((_name(result), parts, None))
    return _bars("Why it went where it went", bars, top=1.0, legend=words)


def _replicas(results: Sequence[Mapping[str, Any]]) -> str:
    title = "Requests of each replica"
    if max((len(r["per_replica"]) for r in results), default=0) > MOST_BARS:
        series = [
            (_name(r), list(enumerate(sorted(r["per_replica"], reverse=True), 1))) for r in results
        ]
        return _lines(f"{title}, most first", Axis("place"), Axis("requests"), series)
    bars: list[Bar] = [
        (f"{_name(result)}, r{position}", [Part(requests, number, f"{requests:,}")], None)
        for number, result in enumerate(results)
        for position, requests in enumerate(result["per_replica"])
    ]
    top = max((max(r["per_replica"]) for r in results), default=0)
    return _bars(title, bars, top=top)


# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """What it shows, and in which unit."""

    name: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


def _lines(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[tuple[str, Points]],
    *,
    held: bool = False,
    by_y: bool = False,
    dots: bool = False,
) -> str:
    """A line each; an empty string without any. Both axes begin at 0.

    ``held``: a value stays until the next one. ``by_y``: the table's rows are those of y.
    ``dots``: each point is marked.
    """
    if not series:
        return ""
    right = max(at for _, points in series for at, _ in points) or 1.0
    top = max(0.0, *(value for _, points in series for _, value in points)) or 1.0
    x_ticks, y_ticks = ticks(right), ticks(top)
    x_scale = (WIDTH - LEFT - RIGHT) / max(right, x_ticks[-1])
    y_scale = (HEIGHT - TOP - BOTTOM) / max(top, y_ticks[-1])
    floor = HEIGHT - BOTTOM
    drawn = []
    for tick in y_ticks:
        at = floor - tick * y_scale
        drawn.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_tick(tick)}</text>'
        )
    for tick in x_ticks:
        at = LEFT + tick * x_scale
        drawn.append(
            f'<text x="{at:.1f}" y="{floor + 16}" text-anchor="middle">{_tick(tick)}</text>'
        )
    drawn.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(str(x))}</text>'
    )
    for number, (_, points) in enumerate(series):
        if dots:
            drawn += [
                f'<circle class="{_look(number)}" cx="{LEFT + at * x_scale:.1f}" '
                f'cy="{floor - value * y_scale:.1f}" r="3"/>'
                for at, value in points
            ]
        if held:
            corners = [((b[0], a[1]), b) for a, b in pairwise(points)]
            points = [*points[:1], *(point for corner in corners for point in corner)]
        path = " ".join(
            f"{LEFT + at * x_scale:.1f},{floor - value * y_scale:.1f}" for at, value in points
        )
        width = 2 + 0.7 * min(len(series) - 1 - number, MOST_WIDER)
        drawn.append(
            f'<polyline class="curve {_look(number)}" stroke-width="{width:.1f}" points="{path}"/>'
        )
    names = ", ".join(name for name, _ in series)
    label = f"{title}: {y}, by {x}; a line for each of {names}. The table below has the numbers."
    keys = "".join(_key(name, number, "line") for number, (name, _) in enumerate(series))
    head, rows = _numbers(x, y, series, by_y=by_y)
    return (
        f"<section><h2>{escape(title)}</h2>"
        f'<p class="soft small">{escape(str(y))}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(drawn)}</svg>"
        f'<ul class="legend">{keys}</ul>'
        f'<details><summary aria-label="Numbers: {escape(title)}">Numbers</summary>'
        f"{_table(head, rows, title)}</details></section>"
    )


def ticks(top: float) -> list[float]:
    """From 0 to not far from ``top``, by 1, 2 or 5 times a power of ten."""
    rough = top / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [round(k * step, 10) for k in range(math.ceil(top / step - 1e-9) + 1)]


def _tick(value: float) -> str:
    """Short enough for the room beside the plot."""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k")):
        if value >= least:
            return f"{value / size:g}{unit}"
    return f"{value:,g}"


def _numbers(
    x: Axis, y: Axis, series: Sequence[tuple[str, Points]], *, by_y: bool
) -> tuple[list[str], list[list[str]]]:
    """Head and rows. What all lines have of x (or of y) stands once, in front; some may end early.

    Where they have nothing in common each has two columns.
    """
    columns = [list(zip(*points, strict=True)) for _, points in series]
    shared, other = (1, 0) if by_y else (0, 1)
    common = max((column[shared] for column in columns), key=len)
    if all(column[shared] == common[: len(column[shared])] for column in columns):
        head = [str((x, y)[shared]), *(name for name, _ in series)]
        cells = [common, *(column[other] for column in columns)]
    else:
        head = [f"{name}: {axis}" for name, _ in series for axis in (x, y)]
        cells = [column[at] for column in columns for at in (0, 1)]
    longest = max(len(column) for column in cells)
    rows = [
        [_number(column[k]) if k < len(column) else "" for column in cells] for k in range(longest)
    ]
    return head, rows


def _number(value: float) -> str:
    return f"{value:,.10g}"


# --- pieces ---------------------------------------------------------------------------------------


def _look(number: int) -> str:
    return f"c{number % COLOURS} d{number % DASHES}"


def _key(name: str, number: int, shape: str) -> str:
    drawn = (
        f'<path class="curve {_look(number)}" d="M0 6H24"/>'
        if shape == "line"
        else f'<rect class="c{number % COLOURS}" x="6" width="12" height="12"/>'
    )
    return (
        f'<li><svg class="key" viewBox="0 0 24 12" aria-hidden="true">{drawn}</svg>'
        f"<span>{escape(name)}</span></li>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """It scrolls where it has no room, by keyboard too."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    tall = " tall" if len(rows) > TALL else ""
    return (
        f'<div class="table{tall}" role="region" aria-label="{escape(name)}, table" tabindex="0">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )

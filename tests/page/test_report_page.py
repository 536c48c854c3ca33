"""The page of `rollmux replay --html` in a real browser, opened from the disk."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from benchmarks import report_page
from tests.page.chromium import DEADLINE_S

pytestmark = pytest.mark.timeout(3 * DEADLINE_S)

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
LONG = "a_module_with_a_long_name.and_another:factory_of_policies"


def write(file: Path) -> str:
    """A page with names as bad as they come; its address."""
    results = [
        {
            "router": router,
            "decisions": {"affinity": 6000, "spilled": 40, "unmatched": 900, MARKUP: 3},
            "cached_share": 0.8,
            "ideal_share": 0.85,
            "per_replica": [5000 - k for k in range(replicas)],
            "tokens_per_second": 12345.6,
            "curves": {
                "request_s": [k / 7 for k in range(1, 101)],
                "group_s": [k / 3 for k in range(1, 101)],
                "bin_s": 64.0,
                "inflight": [float(k % 40) for k in range(120)],
                "tokens_per_second": [50_000.0 * (k % 9) for k in range(120)],
            },
        }
        for router, replicas in (("prefix", 30), (LONG, 30), (MARKUP, 3))
    ]
    report = {
        "rollmux": "1", "trace": MARKUP, "trace_blake3": "0123456789abcdef",
        "options": {"replicas": 30, "inflight": None}, "results": results,
    }  # fmt: skip
    rows = [("", ["prefix", LONG, MARKUP]), ("request, p50", ["1.00 s", "1.00 s", "1,234.00 s"])]
    file.write_text(report_page.page(report, f"{MARKUP}: 3 requests", rows), "utf-8")
    return file.as_uri()


async def test_report_is_shown_on_a_phone_and_on_a_desktop(browser, tmp_path):
    url = await asyncio.to_thread(write, tmp_path / "report.html")
    backs = set()
    for width in (390, 1440):
        for scheme in ("light", "dark"):
            await browser.size(width, scheme=scheme)
            await browser.open(url)
            backs.add(await browser.value("getComputedStyle(document.body).backgroundColor"))
            assert await browser.value("innerWidth") == width
            root = "document.documentElement"
            assert not await browser.value(f"{root}.scrollWidth > {root}.clientWidth")
            image = await browser.screenshot(tmp_path / f"report-{width}-{scheme}.png")
            assert struct.unpack(">I", image[16:20]) == (width,)
            small = await browser.value(
                "Math.min(...[...document.querySelectorAll('svg text')]"
                ".map(text => text.getBoundingClientRect().height))"
            )
            assert small > 9, "text in plots is too small to read"
            wide = await browser.value(
                "[...document.querySelectorAll('svg[role=img]')].filter(svg => {"
                "  const box = svg.getBoundingClientRect();"
                "  return [...svg.querySelectorAll('text, polyline')].some(part => {"
                "    const its = part.getBoundingClientRect();"
                "    return its.left < box.left - 1 || its.right > box.right + 1"
                "      || its.bottom > box.bottom + 1;"
                "  });"
                "}).length"
            )
            assert wide == 0, "something of a plot is cut off"
    assert len(backs) == 2, "dark and light look the same"


async def test_names_stay_text_and_nothing_else_is_asked_for(browser, tmp_path):
    url = await asyncio.to_thread(write, tmp_path / "report.html")
    await browser.open(url)
    assert MARKUP in await browser.text("h1")
    assert MARKUP in await browser.text("thead")
    assert await browser.value("document.querySelectorAll('img, script').length") == 0
    asked = {event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")}
    assert asked - {"about:blank", "data:,"} == {url}
    # And were it put in as markup, the policy of the page would not let it run.
    await browser.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"hacked=1\">')"
    )
    await browser.until("document.querySelector('img').complete")
    assert await browser.value("typeof window.hacked") == "undefined"


async def test_numbers_are_reached_by_keyboard(browser, tmp_path):
    await browser.open(await asyncio.to_thread(write, tmp_path / "report.html"))
    # To the result, to the numbers of the first plot, and there.
    for key, code, text in (("Tab", 9, ""), ("Tab", 9, ""), ("Enter", 13, "\r")):
        pressed = {"key": key, "windowsVirtualKeyCode": code}
        await browser.send("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        await browser.send("Input.dispatchKeyEvent", type="keyUp", **pressed)
    opened = await browser.until("document.querySelector('details[open]')?.innerText")
    assert "4,971" in opened
    tree = await browser.send("Accessibility.getFullAXTree")
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree["nodes"]
        if "role" in node
    }
    plots = [name for role, name in named if role == "image"]
    assert len(plots) == 5
    assert all("The table below has the numbers." in name for name in plots)
    assert ("columnheader", "place") in named
    assert ("DisclosureTriangle", "Numbers: Time of a group") in named

"""The live page in a real browser: what it shows, on which screens, and that text stays text."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.adapter import write_adapter
from benchmarks.httpd import Fault
from benchmarks.replica import SimulatedReplica
from proxy.page import HTML
from proxy.settings import Secrets
from tests.page.chromium import DEADLINE_S
from tests.proxy.conftest import Running, Start
from tests.proxy.scripted import ScriptedReplica, hang, until

pytestmark = pytest.mark.timeout(3 * DEADLINE_S)

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
SHOWN = "!document.getElementById('main').hidden"


async def publish(running: Running, folder: Path, name: str) -> int:
    path = await asyncio.to_thread(write_adapter, folder / name, name, rank=1, layers=1)
    body = {"lora_name": name, "lora_path": str(path)}
    return (await running.client.post("/v1/load_lora_adapter", json=body)).status_code


@asynccontextmanager
async def busy_run(start: Start, folder: Path) -> AsyncIterator[Running]:
    """Two good replicas and one that is down, two policies and a refused one, 24 rollouts."""
    async with (
        SimulatedReplica() as a,
        SimulatedReplica() as b,
        ScriptedReplica() as c,
    ):
        running = await start([a.url, b.url, c.url], retire_grace_s=600.0)
        c.faults.add("*", Fault(status=502, body=b"<html>Bad Gateway</html>"))
        await running.until_ready(2)
        for version in (1, 2):
            assert await publish(running, folder, f"trl-policy-v{version}") == 200
        a.faults.add("/v1/load_lora_adapter", Fault(status=400, body=b'{"error":{}}'))
        assert await publish(running, folder, "trl-policy-v3") != 200
        for i in range(24):
            answer = await running.complete("trl-policy-v2", [i // 8] * 40)
            assert answer.status_code == 200
        unloaded = {"lora_name": "trl-policy-v1"}
        answer = await running.client.post("/v1/unload_lora_adapter", json=unloaded)
        assert answer.status_code == 200
        yield running


async def test_page_shows_the_run_on_a_phone_and_on_a_desktop(start, browser, tmp_path):
    async with busy_run(start, tmp_path) as running:
        await browser.size(1440)
        await browser.open(f"{running.url}/proxy/")
        await browser.until(SHOWN)
        await browser.until("document.querySelectorAll('#chart polyline').length")
        backs = set()
        for width in (390, 1440):
            for scheme in ("light", "dark"):
                await browser.size(width, scheme=scheme)
                backs.add(await browser.value("getComputedStyle(document.body).backgroundColor"))
                assert await browser.value("innerWidth") == width
                root = "document.documentElement"
                assert not await browser.value(f"{root}.scrollWidth > {root}.clientWidth")
                image = await browser.screenshot(tmp_path / f"page-{width}-{scheme}.png")
                assert struct.unpack(">I", image[16:20]) == (width,)
        assert len(backs) == 2, "dark and light look the same"
        queues = "engine runs 0, queues 0"
        await browser.until(f"document.querySelector('#replicas').innerText.includes('{queues}')")
        text = await browser.text()
        for line in ("What holds the run back", "2 of 3", "24", "by prefix", "trl-policy-v2"):
            assert line in text
        cards = await browser.value(
            "[...document.querySelectorAll('#replicas > li')].map(c => c.innerText)"
        )
        assert [card.split()[0] for card in cards] == ["r0", "r1", "r2"]
        assert "● ready" in cards[0]
        assert "trl-policy-v2\nretired, still served: trl-policy-v1" in cards[0].replace(
            "\n\n", "\n"
        )
        assert "✕ down" in cards[2]
        assert "<html>Bad Gateway</html>" in cards[2]
        assert "no adapters" in cards[2]
        routing = await browser.text("#routing")
        for word in ("affinity", "spilled", "unmatched"):
            assert word in routing
        rows = await browser.text("#publications")
        assert rows.index("trl-policy-v3") < rows.index("trl-policy-v2")
        assert "↶ rolled back in" in rows
        assert "✓ committed in" in rows
        assert "r1: 1 load after" in rows


async def test_in_flight_and_a_publication_under_way_are_live(start, browser, tmp_path):
    async def never(arrival):
        return await hang(arrival)

    async with ScriptedReplica(never) as replica:
        running = await start([replica.url])
        await browser.open(f"{running.url}/proxy/")
        await browser.until(SHOWN)
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(running.complete("tiny", [i])) for i in range(7)]
            await until(lambda: len(replica.generations) == 7, within_s=DEADLINE_S)
            with running.daemon.status.publishing("trl-policy-v9") as underway:
                underway.phase = "loading"
                await browser.until(
                    "document.getElementById('replicas').innerText.includes('7 in flight')"
                    " && document.getElementById('publications').innerText"
                    ".includes('trl-policy-v9\\n… loading')"
                )
            await browser.until("document.getElementById('chart').innerText.includes('now 7')")
            for task in sent:
                task.cancel()
        await browser.until("document.getElementById('chart').innerText.includes('now 0')")
        assert "highest 7" in await browser.text("#chart")


async def test_text_of_replicas_is_never_markup(start, browser, tmp_path):
    """An error and an adapter's name that were written to run as a script do not."""
    async with SimulatedReplica() as good, ScriptedReplica() as bad:
        running = await start([good.url, bad.url])
        bad.faults.add("*", Fault(status=502, body=MARKUP.encode()))
        await running.until_ready(1)
        path = await asyncio.to_thread(write_adapter, tmp_path / "v1", "v1", rank=1, layers=1)
        body = {"lora_name": f"v1{MARKUP}", "lora_path": str(path)}
        answer = await running.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200
        await browser.open(f"{running.url}/proxy/")
        await browser.until(SHOWN)
        for place in ("#tiles", "#publications", "#replicas .chips", "#replicas .bad.small"):
            assert MARKUP in await browser.text(place)
        assert await browser.value("document.querySelectorAll('img, #main script').length") == 0
        assert await browser.value("typeof window.hacked") == "undefined"
        # And were it put in as markup, the policy of the page would not let it run.
        await browser.value(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"hacked=1\">')"
        )
        await browser.until("document.querySelector('img').complete")
        assert await browser.value("typeof window.hacked") == "undefined"


async def test_page_asks_for_the_key_and_keeps_it_to_itself(start, browser):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(api_key="the-key"))
        await browser.open(f"{running.url}/proxy/")
        await browser.until("!document.getElementById('ask').hidden")
        assert not await browser.value(SHOWN)
        assert replica.url not in await browser.value("document.documentElement.outerHTML")
        for key in ("wrong", "the-key"):
            await browser.value(
                f"document.getElementById('key').value = '{key}';"
                "document.getElementById('ask').requestSubmit()"
            )
            if key == "wrong":
                refused = "document.getElementById('refused').innerText"
                assert await browser.until(refused) == "That key was not accepted."
        await browser.until(SHOWN)
        assert replica.url in await browser.text()
        assert not await browser.value("!document.getElementById('ask').hidden")
        kept = "document.cookie + JSON.stringify({...localStorage, ...sessionStorage}) + location"
        for place in (kept, "document.documentElement.outerHTML"):
            assert "the-key" not in await browser.value(place)


async def test_old_figures_are_called_old_until_the_daemon_answers_again(start, browser):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        await browser.open(f"{running.url}/proxy/")
        await browser.until(SHOWN)
        stale = "!document.getElementById('stale').hidden"
        assert not await browser.value(stale)
        for offline in (True, False):
            await browser.send(
                "Network.emulateNetworkConditions",
                offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1,
            )  # fmt: skip
            await browser.until(stale if offline else f"!({stale})")


async def test_page_is_complete_in_itself(start, browser):
    """It asks its daemon for its status and nobody for anything else; nothing breaks its policy."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        await browser.open(f"{running.url}/proxy/")
        await browser.until(SHOWN)
        asked = {sent["request"]["url"] for sent in browser.seen("Network.requestWillBeSent")}
        assert {url for url in asked if not url.startswith("data:")} == {
            f"{running.url}/proxy/",
            f"{running.url}/proxy/status",
        }
        assert browser.seen("Log.entryAdded") == []
        assert browser.seen("Runtime.exceptionThrown") == []


async def test_page_is_served_without_the_key_and_says_nothing(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(api_key="the-key"))
        page = await running.client.get("/proxy/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert (await running.client.get("/proxy")).headers["location"] == "/proxy/"
        for path in ("/proxy/status", "/proxy/status.txt", "/proxy/x", "/proxy/replicas"):
            assert (await running.client.get(path)).status_code == 401
        assert (await running.client.post("/proxy/")).status_code == 405
        assert replica.url not in page.text
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_page_names_no_other_place_and_puts_no_text_in_as_markup():
    page = HTML.decode()
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)

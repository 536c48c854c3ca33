"""The bucket gate, before a Hub that answers over a socket."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from benchmarks.adapter import write_adapter
from benchmarks.httpd import Arrival, Reply, Server
from proxy import bucket_gate
from proxy.settings import Secrets

LOAD = "/v1/load_lora_adapter"


class Hub:
    """Lists what is in ``listed``; remembers what it was asked."""

    def __init__(self) -> None:
        self.listed: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.status = 200
        self.asked: list[Arrival] = []
        self.server = Server(self._answer, host="127.0.0.1", port=0)

    async def _answer(self, arrival: Arrival) -> Reply:
        self.asked.append(arrival)
        wanted = orjson.loads(arrival.body)["paths"]
        found = [
            {"type": "file", "path": p, "size": self.sizes.get(p, 1)}
            for p in wanted
            if p in self.listed
        ]
        return Reply(self.status, orjson.dumps(found), "application/json")


@pytest.fixture
async def hub():
    found = Hub()
    await found.server.listen()
    yield found
    await found.server.close()


async def begin(start, pair, hub, tmp_path, **settings):
    return await start(
        [r.url for r in pair],
        bucket_gate=f"me/run={tmp_path}",
        hub_endpoint=hub.server.url,
        secrets=Secrets(hub_token="hf_secret"),
        **settings,
    )


def load(running, path):
    body = {"lora_name": "trl-policy-v1", "lora_path": str(path)}
    return running.client.post(LOAD, json=body)


async def test_no_replica_looks_before_the_hub_lists_every_file(start, pair, hub, tmp_path):
    running = await begin(start, pair, hub, tmp_path)
    path = write_adapter(tmp_path / "out" / "trl-policy-v1", seed=1)
    hub.listed = {"out/trl-policy-v1/adapter_config.json"}
    call = asyncio.ensure_future(load(running, path))
    await running.until(lambda: len(hub.asked) >= 2)
    assert not any(r.calls(LOAD) for r in pair)
    hub.listed.add("out/trl-policy-v1/adapter_model.safetensors")
    assert (await call).status_code == 200
    assert [len(r.calls(LOAD)) for r in pair] == [1, 1]
    assert hub.asked[0].target == "/api/buckets/me/run/paths-info"
    assert hub.asked[0].header("authorization") == "Bearer hf_secret"


async def test_a_hub_that_fails_is_left_out_and_told(
    start, pair, hub, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(bucket_gate, "PATIENCE_S", 0.1)
    hub.status = 503
    running = await begin(start, pair, hub, tmp_path)
    with caplog.at_level(logging.WARNING, logger="rollmux"):
        answer = await load(running, write_adapter(tmp_path / "trl-policy-v1", seed=1))
    assert answer.status_code == 200
    assert "the Hub answered 503" in caplog.text
    assert "hf_secret" not in caplog.text


async def test_a_folder_is_flushed_once_every_file_is_listed_with_its_size(
    start, pair, hub, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket_gate, "BATCH", 2)
    running = await begin(start, pair, hub, tmp_path)
    out = tmp_path / "out"
    names = ["a", "b", "deep/c", ".rollmux/copy/d"]
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("12345")

    async def look():
        answer = await running.client.post("/proxy/flush", json={"path": str(out)})
        assert answer.status_code == 200
        return answer.json()

    assert await look() == {"files": 3, "missing": 3, "first_missing": ["out/a"], "problem": ""}
    hub.listed = {f"out/{name}" for name in names[:3]}
    hub.sizes = {"out/a": 5, "out/b": 5, "out/deep/c": 4}  # an older version of it
    assert (await look())["first_missing"] == ["out/deep/c"]
    hub.sizes["out/deep/c"] = 5
    assert await look() == {"files": 3, "missing": 0, "first_missing": [], "problem": ""}
    hub.status = 503
    assert "503" in (await look())["problem"]


@pytest.mark.parametrize("body", [{"path": "/elsewhere"}, {"path": 7}, {}, [], "no JSON"])
async def test_a_flush_of_what_is_not_in_the_bucket_is_refused(start, pair, hub, tmp_path, body):
    running = await begin(start, pair, hub, tmp_path)
    content = body if isinstance(body, str) else orjson.dumps(body)
    answer = await running.client.post("/proxy/flush", content=content)
    assert answer.status_code == 400
    missing = await running.client.post("/proxy/flush", json={"path": str(tmp_path / "none")})
    assert (missing.status_code, "No such file" in missing.text) == (400, True)


async def test_a_path_outside_the_mount_is_not_asked_for(start, pair, hub, tmp_path):
    running = await begin(start, pair, hub, tmp_path / "mount")
    answer = await load(running, write_adapter(tmp_path / "trl-policy-v1", seed=1))
    assert answer.status_code == 200
    assert hub.asked == []

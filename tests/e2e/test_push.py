"""Adapters pushed into a stock vLLM, by a client written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from benchmarks.adapter import write_adapter
from broadcast import adapter_dir
from tests.e2e.conftest import START_S, RealParts, replica_running
from tests.e2e.processes import ROOT, Process, wait_for_health

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KEY = "the-replicas-own"
VLLM_KEY = "vllms-own"
MIDDLEWARE = ("--middleware", "rollmux_push.AdapterPush")


def push_environ(root: Path) -> dict[str, str]:
    """What a replica with the endpoint is started with."""
    return {
        "PYTHONPATH": str(ROOT / "deploy" / "replica"),
        "ROLLMUX_PUSH_KEY": KEY,
        "ROLLMUX_PUSH_ROOT": str(root),
    }


@pytest.fixture(scope="module")
def pushable(
    real_parts: RealParts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Process, Path]]:
    """One real replica with the endpoint, and the folder it keeps adapters in."""
    directory = tmp_path_factory.mktemp("pushable")
    root = directory / "push"
    options = (*MIDDLEWARE, "--api-key", VLLM_KEY)
    with replica_running(real_parts, directory / "0.log", options, environ=push_environ(root)) as (
        url,
        process,
    ):
        wait_for_health(process, f"{url}/health", START_S)
        yield url, process, root


@pytest.fixture
def vllm(pushable: tuple[str, Process, Path]) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {VLLM_KEY}", "x-rollmux-push-key": KEY}
    with httpx.Client(
        base_url=pushable[0], headers=headers, timeout=120, trust_env=False
    ) as client:
        yield client


def push(vllm: httpx.Client, source: Path) -> tuple[str, str]:
    """(what its calls are about, where the adapter is)."""
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    digest = adapter_dir.digest(source)
    target = f"/rollmux/push/{source.name}-{digest}"
    lines = [
        {"name": name, "bytes": len(data), "digest": blake3(data).hexdigest()}
        for name, data in files.items()
    ]
    manifest = {"digest": digest, "files": lines}
    missing = vllm.post(target, json=manifest).json()["missing"]
    assert set(missing) == set(files)
    for name in missing:
        sent = vllm.put(f"{target}/{name}", content=files[name])
        assert sent.status_code == 204, sent.text
    done = vllm.post(target, json=manifest)
    assert (done.status_code, done.json()["published"]) == (200, True)
    return target, done.json()["path"]


def control(vllm: httpx.Client, what: str, **body: str) -> httpx.Response:
    return vllm.post(f"/v1/{what}_lora_adapter", json=body)


def logprobs(vllm: httpx.Client, model: str) -> Any:
    """Of the prompt's own tokens: how the model's weights show."""
    body = {"model": model, "prompt": "one two three", "max_tokens": 1, "temperature": 0}
    body |= {"echo": True, "logprobs": 0}
    answer = vllm.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def test_pushed_adapter_is_loaded_generates_and_stays_while_it_is_listed(
    vllm: httpx.Client, pushable: tuple[str, Process, Path], tmp_path: Path
) -> None:
    """Its files are only ever on the replica: the trainer's folder is gone when it is loaded."""
    base = vllm.get("/v1/models").json()["data"][0]["id"]
    source = write_adapter(tmp_path / "trainer" / "trl-policy-v1", base=base)
    target, path = push(vllm, source)
    for file in source.iterdir():
        file.unlink()
    source.rmdir()
    assert Path(path).is_relative_to(pushable[2])
    loaded = control(vllm, "load", lora_name="trl-policy-v1", lora_path=path)
    assert loaded.status_code == 200, loaded.text
    assert logprobs(vllm, "trl-policy-v1") != logprobs(vllm, base) == logprobs(vllm, base)
    refused = vllm.delete(target)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "listed")
    (held,) = vllm.get("/rollmux/push").json()["adapters"]
    assert held["path"] == path
    assert control(vllm, "unload", lora_name="trl-policy-v1").status_code == 200
    assert vllm.delete(target).status_code == 204
    assert not Path(path).exists()


def test_other_paths_and_their_key_are_vllms_own(pushable: tuple[str, Process, Path]) -> None:
    """Each key opens its own door only."""
    with httpx.Client(base_url=pushable[0], timeout=120, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/version").json()["version"].startswith("0.27.1")
        assert client.get("/rollmux/pushy").status_code == 404
        vllms = {"authorization": f"Bearer {VLLM_KEY}"}
        ours = {"x-rollmux-push-key": KEY}
        assert client.get("/v1/models", headers=ours).status_code == 401
        assert client.get("/v1/models", headers=vllms).status_code == 200
        refused = client.get("/rollmux/push", headers=vllms)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_key")
        assert refused.headers["x-rollmux-push"] == "1"
        assert client.get("/rollmux/push", headers=ours).status_code == 200

"""The simulated replica answers as real vLLM 0.27.1 does: status, content type and body.

Each scenario is sent, step by step, to a real server and to the simulation. Bodies are compared
after parsing, key order included. What only a real model or a clock can know is levelled first:
ids, times, texts, token ids and probabilities (their number and type stay), and token counts
where a text was tokenized. `ROLLMUX_E2E_REPLICA_URL` names a server already running; it dies in
the last scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.adapter import CONFIG, WEIGHTS, write_adapter
from benchmarks.replica import SimulatedReplica
from tests.e2e.conftest import START_S, RealParts, replica_running
from tests.e2e.processes import wait_for_health

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(START_S + 120)]

PROMPT = list(range(10, 60))
CHAT = [{"role": "user", "content": "What is 3 plus 4?"}]
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Step:
    """One request. ``@/`` at the start of a string in the body stands for the adapters' folder,
    ``@model`` for the base model's name."""

    method: str
    target: str
    body: Any = None
    content_type: str | None = JSON
    headers: tuple[tuple[str, str], ...] = ()
    text: bool = False
    """The prompt is text: how many tokens that makes is the tokenizer's business."""
    loose: bool = False
    """The reply was cut short somewhere: how many tokens there are is chance."""
    beside: bool = False
    """Sent beside the steps that follow, and awaited at the end of the scenario."""


def get(target: str, **more: Any) -> Step:
    return Step("GET", target, **more)


def post(target: str, body: Any = None, **more: Any) -> Step:
    return Step("POST", target, body, **more)


def load(name: str, directory: str, **fields: Any) -> Step:
    path = f"@/{directory}" if directory and directory[0] not in "./" else directory
    return post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


def unload(name: str) -> Step:
    return post("/v1/unload_lora_adapter", {"lora_name": name})


def complete(*drop: str, **fields: Any) -> Step:
    own = {k: fields.pop(k) for k in ("text", "loose", "beside", "headers") if k in fields}
    body = {
        "model": "@model",
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    } | fields
    return post("/v1/completions", {k: v for k, v in body.items() if k not in drop}, **own)


def chat(*drop: str, **fields: Any) -> Step:
    own = {k: fields.pop(k) for k in ("loose", "beside") if k in fields}
    body = {
        "model": "@model",
        "messages": CHAT,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    } | fields
    kept = {k: v for k, v in body.items() if k not in drop}
    return post("/v1/chat/completions", kept, text=True, **own)


LONG = {"max_tokens": 900, "beside": True, "loose": True}
MESSAGES = {"model": "@model", "max_tokens": 4, "messages": CHAT, "temperature": 0}
TOKENS = {"model": "@model", "token_ids": PROMPT}
FOUR = {"max_tokens": 4, "ignore_eos": True}
NO_NAME = {"model": "nope", "max_tokens": 4, "messages": CHAT}
TEXT_BODY = json.dumps({"model": "x", "prompt": "y"})
VERSION = "/update_weight_version"
TRANSFER = "/init_weight_transfer_engine"
IN_FLIGHT_S = 0.2, 0.05, 0.1, 0.4, 0.2, 0.05, 0.1, 0.4
"""How long what follows a request waits for it to be in flight, at each try. Nothing that may be
asked tells in time whether the engine has it; its 900 tokens take half a second on an idle machine,
and one that is busy may hear what follows before that, or after."""

SCENARIOS: dict[str, list[Step]] = {
    "facts about the server": [
        get("/health"),
        get("/ping"),
        post("/ping"),
        get("/version"),
        get("/load"),
        get("/v1/models"),
        get("/is_paused"),
        get("/is_sleeping"),
        get("/weight_info"),
        get("/get_world_size"),
        get("/get_world_size?include_dp=false"),
        get("/server_info?config_format=bogus"),
        get("/nope"),
        get("/pause"),
        get("/resume"),
        get("/v1/completions"),
        get("/v1/load_lora_adapter"),
        get("/adapters"),
        post("/health"),
        Step("HEAD", "/health"),
        Step("OPTIONS", "/v1/completions"),
        Step("DELETE", "/v1/models"),
        get("/v1/models/"),
        get("/server_info/"),
    ],
    "names come and go": [
        load("a1", "good1"),
        load("a1", "good1"),
        load("a1", "good2"),
        get("/v1/models"),
        load("a1", "good1", load_inplace=True),
        load("a2", "good2", extra=1),
        unload("a1"),
        unload("a1"),
        post("/v1/unload_lora_adapter", {"lora_name": "a2", "lora_int_id": 7}),
        # The base model's own name is accepted, and then shadows it.
        load("@model", "good1"),
        get("/v1/models"),
        complete(),
        unload("@model"),
        post("/adapters", {"name": "s1", "src": "@/good1"}),
        Step("DELETE", "/adapters/s1"),
        Step("DELETE", "/adapters/s1"),
        load("x", "good1"),
        unload("x"),
        get("/v1/models"),
    ],
    "loads refused": [
        load("x", "missing"),
        load("x", "missing/deeper"),
        load("x", "./relative/nope"),
        load("x", "/lora/run/v1"),
        load("x", "/mnt/lora/v1"),
        load("x", "no_config"),
        load("x", "empty"),
        load("x", "no_weights"),
        load("x", "weights_0"),
        load("x", "weights_5"),
        load("x", "weights_60"),
        load("x", "weights_half"),
        load("x", "config_0"),
        load("x", "config_20"),
        load("x", "config_60"),
        load("x", "no_r"),
        load("x", "no_r_no_alpha"),
        load("x", "rank_16"),
        load("x", "dora"),
        load("x", "modules_to_save"),
        load("x", "bias"),
        load("x", "rank_and_dora"),
        load("x", "foreign_module"),
        load("x", f"good1/{CONFIG}"),
        load("x", ""),
        load("", "good1"),
        get("/v1/models"),
        load("x", "wrong_shapes"),  # accepted silently
        unload("x"),
    ],
    "loads that are no loads": [
        post("/v1/load_lora_adapter", {"lora_name": "q"}),
        post("/v1/load_lora_adapter", {"lora_path": "q"}),
        post("/v1/load_lora_adapter", {}),
        post("/v1/load_lora_adapter", "{bad"),
        post("/v1/load_lora_adapter", []),
        post("/v1/load_lora_adapter", "{}", content_type="text/plain"),
        post("/v1/load_lora_adapter", ""),
        post("/v1/load_lora_adapter", content_type=None),
        post("/v1/load_lora_adapter", {"lora_name": 5, "lora_path": "q"}),
        load("x", "good1", load_inplace="maybe"),
        unload(""),
        post("/v1/unload_lora_adapter", {}),
        post("/v1/unload_lora_adapter", "{bad"),
    ],
    "completions": [
        load("a1", "good1"),
        complete(),
        complete(logprobs=0, return_token_ids=True),
        complete(logprobs=2, n=2, temperature=1.0, seed=2**62 + 1, return_token_ids=True),
        complete(model="a1", logprobs=0, return_token_ids=True, seed=5),
        complete(prompt="What is 3 plus 4?", logprobs=0, return_token_ids=True, text=True),
        complete(prompt=["What is", "the number"], text=True),
        complete(prompt=[[1, 2, 3], [4, 5, 6]]),
        complete("model"),
        complete(model=""),
        complete(model=None),
        complete("max_tokens"),
        complete(max_tokens=None),
        complete(unknown_field=3),
        complete(seed=-1),
        complete(request_id="foo"),
        complete(headers=(("x-request-id", "abc"),)),
        complete(headers=(("endpoint-load-metrics-format", "JSON"),)),
        complete(headers=(("endpoint-load-metrics-format", "TEXT"),)),
        complete(stream=True),
        complete(
            stream=True,
            logprobs=0,
            return_token_ids=True,
            stream_options={"include_usage": True},
        ),
        unload("a1"),
    ],
    "completions refused": [
        complete(model="nope"),
        complete(model="nope", stream=True),
        complete("prompt"),
        complete(prompt=None),
        complete(prompt=[]),
        complete(prompt=""),
        complete(prompt=[[]]),
        complete(prompt=[2**31]),
        complete(prompt=[100_000]),
        complete(prompt=[-1]),
        complete(prompt=["a", 3]),
        complete(prompt=5),
        complete(max_tokens=2000),
        complete(max_tokens=0),
        complete(max_tokens=-1),
        complete(prompt=[5] * 1030),
        complete(prompt=[5] * 1024),
        complete(prompt=[5] * 1023, max_tokens=5),
        complete(n=0),
        complete(temperature=-1),
        complete(top_p=0),
        complete(logprobs=50),
        complete(seed=2**64),
        complete(min_tokens=3, max_tokens=2),
        post("/v1/completions", "{bad"),
        post("/v1/completions", []),
        post("/v1/completions", ""),
        post("/v1/completions", TEXT_BODY, content_type="text/plain"),
    ],
    "chat and its neighbours": [
        chat(),
        chat(logprobs=True, top_logprobs=0, return_token_ids=True),
        chat(logprobs=True, top_logprobs=2, n=2, temperature=1),
        chat("max_tokens", max_completion_tokens=3),
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        chat(stream=True),
        chat(
            stream=True,
            logprobs=True,
            return_token_ids=True,
            stream_options={"include_usage": True},
        ),
        chat(model="nope"),
        chat(messages=[]),
        chat("messages"),
        chat(max_tokens=2000),
        post("/v1/messages", MESSAGES, text=True),
        post("/v1/messages", NO_NAME),
        post(
            "/inference/v1/generate",
            TOKENS | {"sampling_params": FOUR | {"temperature": 0, "logprobs": 0}},
        ),
        post("/inference/v1/generate", TOKENS | {"sampling_params": FOUR}),
        post("/inference/v1/generate", TOKENS | {"model": "nope", "sampling_params": {}}),
        post("/tokenize", {"model": "@model", "prompt": "What is"}, text=True),
        post("/tokenize", {"model": "@model", "messages": CHAT}, text=True),
        post("/tokenize", {"prompt": "What is", "return_token_strs": True}, text=True),
        post("/tokenize", {"model": "nope", "prompt": "What is"}),
        post("/tokenize", {}),
        post("/detokenize", {"model": "@model", "tokens": [10, 11, 12]}),
        post("/detokenize", {"model": "@model"}),
        post("/detokenize", {"model": "nope", "tokens": [1]}),
        post("/v1/completions/render", {"model": "@model", "prompt": "What is"}, text=True),
        post("/v1/chat/completions/render", {"model": "@model", "messages": CHAT}, text=True),
    ],
    "pause": [
        post("/pause?mode=keep"),
        get("/is_paused"),
        get("/health"),
        complete(model="nope"),
        post("/tokenize", {"model": "@model", "prompt": "What is"}, text=True),
        load("p1", "good2"),
        unload("p1"),
        post("/reset_prefix_cache"),
        post("/pause?mode=keep"),
        post("/resume"),
        get("/is_paused"),
        post("/resume"),
        post("/pause"),
        post("/resume"),
        post("/pause?mode=keep&clear_cache=false"),
        post("/resume"),
        post("/pause?mode=wait"),
        get("/is_paused"),
        post("/resume"),
        post("/pause?wait_for_inflight_requests=true"),
        post("/resume"),
        post("/pause", {"mode": "keep"}),
        post("/resume"),
        post("/pause?mode=bogus"),
        post("/pause?clear_cache=maybe"),
        get("/is_paused"),
    ],
    "requests in flight at an abort": [
        complete(**LONG),
        post("/reset_prefix_cache"),
        post("/pause"),
        post("/resume"),
    ],
    "requests frozen and aborted": [
        post("/pause?mode=keep"),
        complete(beside=True),
        chat(beside=True),
        post("/v1/messages", MESSAGES, text=True, beside=True),
        post("/inference/v1/generate", TOKENS | {"sampling_params": {}}, beside=True),
        post("/abort_requests", {}),
        post("/resume"),
    ],
    "requests frozen and resumed": [
        post("/pause?mode=keep"),
        complete(beside=True),
        post("/resume"),
    ],
    "requests preempted": [
        complete(max_tokens=900, beside=True),
        post("/reset_prefix_cache"),
        post("/reset_prefix_cache?reset_running_requests=true"),
    ],
    "caches, sleep, aborts": [
        post("/reset_prefix_cache"),
        post("/reset_prefix_cache?reset_running_requests=true"),
        post("/reset_prefix_cache?reset_external=true"),
        post("/reset_prefix_cache?reset_running_requests=maybe"),
        post("/reset_mm_cache"),
        post("/reset_encoder_cache"),
        post("/sleep?level=0"),
        get("/is_sleeping"),
        get("/is_paused"),
        post("/wake_up"),
        get("/is_sleeping"),
        get("/is_paused"),
        post("/wake_up?tags=weights"),
        post("/sleep?level=bogus"),
        post("/abort_requests", {}),
        post("/abort_requests", {"request_ids": ["a"]}),
        post("/abort_requests", content_type=None),
        post("/abort_requests", "{bad"),
    ],
    "weights in place, without a weight transfer configured": [
        post(TRANSFER, {}),
        post(TRANSFER, {"init_info": {"x": 1}}),
        post(TRANSFER, "{bad"),
        post("/start_weight_update", {}),
        post("/start_weight_update", content_type=None),
        post("/update_weights", {}),
        post("/update_weights", {"update_info": {"names": []}}),
        post("/update_weights", "{bad"),
        post("/finish_weight_update", content_type=None),
        post("/finish_weight_update", {"weight_version": "v7"}),
        get("/weight_info"),
        post(VERSION, {"new_version": "run-1"}),
        get("/weight_info"),
        post(VERSION, {}),
        post(VERSION, "{bad"),
        post(VERSION, {"new_version": "default"}),
    ],
    "calls of worker methods": [
        post("/collective_rpc", {}),
        post("/collective_rpc", {"method": "nope"}),
        post("/collective_rpc", "{bad"),
    ],
}


def write_adapters(folder: Path) -> None:
    """The directories that the scenarios name."""
    for i in (1, 2):
        write_adapter(folder / f"good{i}", i)
    write_adapter(folder / "wrong_shapes", 1, hidden=64)
    write_adapter(folder / "rank_16", 1, rank=16)
    write_adapter(folder / "rank_and_dora", 1, rank=16, use_dora=True)
    write_adapter(folder / "foreign_module", 1, modules=["foo"])
    write_adapter(folder / "no_r", 1, r=...)
    write_adapter(folder / "no_r_no_alpha", 1, r=..., lora_alpha=..., target_modules=...)
    write_adapter(folder / "dora", 1, use_dora=True)
    write_adapter(folder / "modules_to_save", 1, modules_to_save=["lm_head"])
    write_adapter(folder / "bias", 1, bias="all")
    for file, key in ((WEIGHTS, "weights"), (CONFIG, "config")):
        for length in (0, 5, 20, 60):
            path = write_adapter(folder / f"{key}_{length}", 1) / file
            path.write_bytes(path.read_bytes()[:length])
    half = write_adapter(folder / "weights_half", 1) / WEIGHTS
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    (write_adapter(folder / "no_weights", 1) / WEIGHTS).unlink()
    (write_adapter(folder / "no_config", 1) / CONFIG).unlink()
    (folder / "empty").mkdir()


@pytest.fixture(scope="module")
def real_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server of this module's own: the shared ones must not count its preemptions, nor die."""
    if named := os.environ.get("ROLLMUX_E2E_REPLICA_URL"):
        yield named
        return
    parts: RealParts = request.getfixturevalue("real_parts")
    log = tmp_path_factory.mktemp("conformance") / "vllm.log"
    with replica_running(parts, log) as (url, process):
        wait_for_health(process, f"{url}/health", START_S)
        yield url


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder)
    return folder


def simulation_of(url: str) -> SimulatedReplica:
    """Configured as the real server says it is."""
    info = httpx.get(f"{url}/server_info?config_format=json", timeout=30, trust_env=False)
    config = info.json()["vllm_config"]
    card = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()["data"][0]
    return SimulatedReplica(
        model=card["id"],
        root=card["root"],
        max_model_len=card["max_model_len"],
        dtype=config["model_config"]["dtype"],
        max_lora_rank=config["lora_config"]["max_lora_rank"],
        max_loras=config["lora_config"]["max_loras"],
        max_cpu_loras=config["lora_config"]["max_cpu_loras"],
        max_num_seqs=config["scheduler_config"]["max_num_seqs"],
        block_tokens=config["cache_config"]["block_size"],
        num_blocks=config["cache_config"]["num_gpu_blocks"],
        step_s=0.005,  # slow enough to be caught in flight
    )


Answer = tuple[int, dict[str, str], Any]


class Session:
    """Sends the steps of one scenario to one server."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, adapters: Path) -> None:
        self.client = client
        self.url = url
        self.model = model
        self.adapters = adapters

    async def play(self, steps: list[Step], in_flight_s: float = IN_FLIGHT_S[0]) -> list[Answer]:
        """One answer per step, in the steps' order."""
        waiting: dict[int, asyncio.Task[Answer]] = {}
        answers: dict[int, Answer] = {}
        async with asyncio.TaskGroup() as group:
            for i, step in enumerate(steps):
                if step.beside:
                    waiting[i] = group.create_task(self.send(step))
                    await asyncio.sleep(in_flight_s)
                else:
                    answers[i] = await self.send(step)
        answers |= {i: task.result() for i, task in waiting.items()}
        return [answers[i] for i in range(len(steps))]

    async def send(self, step: Step) -> Answer:
        body = step.body
        if body is not None and not isinstance(body, str):
            body = json.dumps(self.filled(body))
        headers = dict(step.headers)
        if step.content_type is not None and body is not None:
            headers["content-type"] = step.content_type
        reply = await self.client.request(
            step.method, f"{self.url}{step.target}", content=body, headers=headers
        )
        shown = {
            name: reply.headers[name].replace(self.url, "")
            for name in ("content-type", "allow", "location", "endpoint-load-metrics")
            if name in reply.headers
        }
        return reply.status_code, shown, self.levelled(step, reply)

    def filled(self, body: Any) -> Any:
        if isinstance(body, dict):
            return {key: self.filled(value) for key, value in body.items()}
        if isinstance(body, str):
            path = f"{self.adapters}/{body[2:]}" if body.startswith("@/") else body
            return self.model if body == "@model" else path
        return body

    def levelled(self, step: Step, reply: httpx.Response) -> Any:
        kind = reply.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            events = [line[6:] for line in reply.text.split("\n\n") if line]
            return [e if e == "[DONE]" else level(json.loads(e), step) for e in events]
        if kind == JSON and reply.content:
            return level(json.loads(reply.content), step)
        return reply.text


def level(value: Any, step: Step, key: str = "") -> Any:
    """The value without what only a real model, a tokenizer or a clock can know."""
    if isinstance(value, dict):
        if key == "top_logprobs":
            return "some"  # texts of tokens are its keys, and two tokens may share one
        return {k: level(v, step, k) for k, v in value.items()}
    if key in ("created", "system_fingerprint"):
        return type(value).__name__
    if key in ("id", "request_id") and isinstance(value, str):
        return re.sub(r"-[0-9a-f]{16}$", "-…", value)
    counts = ("prompt_tokens", "total_tokens", "input_tokens", "count")
    if step.text and key in (*counts, "max_tokens"):
        return type(value).__name__
    if step.loose and key in ("total_tokens", "completion_tokens", "output_tokens"):
        return type(value).__name__
    made = ("prompt_token_ids", "tokens", "token_strs", "token_ids")
    if step.text and key in made and isinstance(value, list) and "logprobs" not in str(step.body):
        return "some"
    if key == "prompt_token_ids" and step.text and value is not None:
        return "some"
    if key in ("text", "content", "token", "logprob", "bytes") and not isinstance(value, list):
        return type(value).__name__
    if key == "bytes":
        return "some"
    if key in ("token_logprobs", "text_offset", "token_ids", "tokens") and value is not None:
        return "some" if step.loose else len(value)
    if isinstance(value, list):
        return [level(item, step, key) for item in value]
    if isinstance(value, str) and "{'" in value:
        # A Python set in a message comes in any order.
        return re.sub(r"\{('\w+'(?:, '\w+')*)\}", lambda m: str(sorted(m[1].split(", "))), value)
    return value


@pytest.mark.parametrize("name", SCENARIOS)
async def test_answers_are_those_of_real_vllm(name: str, real_url: str, adapters: Path) -> None:
    steps = SCENARIOS[name]
    async with (
        simulation_of(real_url) as simulation,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        client.headers["connection"] = "close"  # some answers end it unannounced
        model = simulation.config.model
        tries = IN_FLIGHT_S if any(step.beside for step in steps) else IN_FLIGHT_S[:1]
        told = []
        for in_flight_s in tries:
            real = await Session(client, real_url, model, adapters).play(steps, in_flight_s)
            simulated = await Session(client, simulation.url, model, adapters).play(steps)
            if not (found := differences(steps, real, simulated)):
                break
            told += [f"what follows comes after {in_flight_s} s:", *found]
    assert not found, "\n" + "\n".join(told)


def differences(steps: list[Step], real: list[Answer], simulated: list[Answer]) -> list[str]:
    return [
        f"{step.method} {step.target} {str(step.body)[:200]}\n  real      {a}\n  simulated {b}"
        for step, a, b in zip(steps, real, simulated, strict=True)
        if json.dumps(a) != json.dumps(b)  # as text: the order of keys counts too
    ]


async def closes(url: str, target: str, body: object) -> bool:
    """Whether the server ends the connection right after its answer, which did not say so."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        content = json.dumps(body).encode()
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-type: {JSON}\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in answer.lower()
        try:
            async with asyncio.timeout(2):  # an idle connection lives for 5 s
                await reader.read()
        except TimeoutError:
            return False
        return True
    finally:
        writer.close()


async def test_only_an_unexpected_exception_ends_the_connection(real_url: str) -> None:
    calls: list[tuple[str, object]] = [
        ("/v1/completions", []),
        ("/collective_rpc", {"method": "nope"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere/x"}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": -1}),
    ]
    async with simulation_of(real_url) as simulation:
        for target, body in calls:
            really = await closes(real_url, target, body)
            assert await closes(simulation.url, target, body) is really, target


def within(part: Any, whole: Any, place: str = "") -> list[str]:
    """Where ``part`` has a key that ``whole`` lacks, or a value of another type."""
    if isinstance(part, dict) and isinstance(whole, dict):
        lost = [f"{place}.{key} is not in the real one" for key in part if key not in whole]
        common = [key for key in part if key in whole]
        order = [key for key in whole if key in common]
        if order != common:
            lost.append(f"{place}: keys come as {common}, really as {order}")
        return lost + [w for k in common for w in within(part[k], whole[k], f"{place}.{k}")]
    same = type(part) is type(whole)
    return [] if same else [f"{place}: {part!r} is really {whole!r}"]


@pytest.mark.parametrize("query", ["", "?config_format=text", "?config_format=json"])
async def test_server_info_says_nothing_that_the_real_one_does_not(
    query: str, real_url: str
) -> None:
    async with (
        simulation_of(real_url) as simulation,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        real = (await client.get(f"{real_url}/server_info{query}")).json()
        simulated = (await client.get(f"{simulation.url}/server_info{query}")).json()
    assert within(simulated, real) == []
    if query.endswith("json"):
        lora = simulated["vllm_config"]["lora_config"]
        assert lora.items() <= real["vllm_config"]["lora_config"].items()


def families(page: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """For each vLLM family its type and the sets of label names seen."""
    kinds = dict(re.findall(r"^# TYPE (vllm:\S+) (\w+)$", page, re.MULTILINE))
    out: dict[str, tuple[str, set[tuple[str, ...]]]] = {n: (k, set()) for n, k in kinds.items()}
    for name, labels in re.findall(r"^(vllm:\w+)\{(.*)\} ", page, re.MULTILINE):
        if name in out:
            out[name][1].add(tuple(re.findall(r'(\w+)="', labels)))
    return out


async def test_metrics_have_the_real_names_types_and_labels(real_url: str) -> None:
    async with (
        simulation_of(real_url) as simulation,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        pages = []
        for url in (real_url, simulation.url):
            body = {"prompt": PROMPT, "max_tokens": 2}
            await client.post(f"{url}/v1/completions", json=body)
            reply = await client.get(f"{url}/metrics")
            pages.append((reply.headers["content-type"], families(reply.text)))
    (real_type, real), (simulated_type, simulated) = pages
    assert real_type == simulated_type
    assert simulated
    for name, (kind, labels) in simulated.items():
        assert name in real
        assert kind == real[name][0]
        if name == "vllm:cache_config_info":  # every setting is a label; some are enough
            (few,), (all_labels,) = labels, real[name][1]
            assert set(few) <= set(all_labels)
        else:
            assert labels == real[name][1]


async def test_the_engine_dies_of_an_evicted_adapter_whose_files_are_gone(
    real_url: str, tmp_path: Path
) -> None:
    """Last, because nobody answers afterwards. Facts 3.3 (b), and 3.5 for what follows."""
    stories = []
    async with (
        simulation_of(real_url) as simulation,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        slots = simulation.config.engine.max_cpu_loras
        for url in (real_url, simulation.url):
            folder = tmp_path / f"{len(stories)}"
            session = Session(client, url, simulation.config.model, folder)
            for i in range(slots + 1):
                write_adapter(folder / f"v{i}", i)
                await session.send(load(f"v{i}", f"v{i}"))
            shutil.rmtree(folder / "v0")
            deadly = [complete(**LONG), complete(model="v0", loose=True)]
            stories.append(await session.play(deadly, min(IN_FLIGHT_S)))
            statuses = set()
            async with asyncio.timeout(30):  # until nobody listens
                with contextlib.suppress(httpx.TransportError):
                    while True:
                        statuses.add((await client.get(f"{url}/health")).status_code)
                        await asyncio.sleep(0.01)
            # The real one shows 503 for some 0.3 s, or exits before anybody has seen it.
            assert statuses <= {200, 503}
    assert stories[0] == stories[1]
    assert [answer[0] for answer in stories[1]] == [500, 500]

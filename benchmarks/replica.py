"""A simulated vLLM 0.27.1 server: real HTTP and real answers, over the engine model.

    async with SimulatedReplica() as replica:          # in a test; many fit in one event loop
        replica.url, replica.faults, replica.log, replica.engine

    python -m benchmarks.replica --port 8001           # as a process; /sim/* is its remote control

What a reply says depends on who computed it: its tokens are a function of the adapter's bytes
(or the base model), the prompt and the position. ``expected_tokens`` tells what it must be.
Adapter directories are really read, optionally through a ``LaggingFolder``.

Remote control: GET /sim/log, DELETE /sim/log; POST /sim/faults (a JSON object with ``path``,
optionally ``method``, ``nth``, ``times``, and the fields of a Fault), DELETE /sim/faults;
GET /sim/state; POST /sim/die, /sim/restart, /sim/refuse (``{"for_s": 2}``). These calls are
not logged and no fault touches them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from benchmarks import replies, tokens
from benchmarks.adapter import Read, Unreadable, read_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.engine import Adapter, Engine, EngineConfig, Job, Outcome, Pause, chain
from benchmarks.httpd import CONTROL, Arrival, Fault, Faults, Reply, Server, with_headers
from benchmarks.replies import Refused, bad_request, error, invalid, json_reply, missing

Route = Callable[[Arrival], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What the server was started with, as far as it shows outside."""

    model: str = "tiny"
    root: str | None = None
    """Path of the base model; None: the same as its name."""
    max_model_len: int = 1024
    vocab_size: int = 321
    dtype: str = "torch.bfloat16"
    max_lora_rank: int = 8
    lora: bool = True
    """--enable-lora"""
    runtime_lora: bool = True
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING"""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE"""
    weight_transfer: bool = False
    """--weight-transfer-config"""
    data_parallel_size: int = 1
    api_key: str | None = None
    bearer: str | None = None
    """What an edge in front demands on every path; it answers 401 in HTML otherwise."""
    keep_alive_s: float = 5.0
    mean_output_tokens: int | None = None
    """Replies end by themselves after this many tokens on average; None: at max_tokens."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    notice_s: float = 0.1
    """From the engine's death to the 500 of whoever waits (facts: 0.1 s)."""
    exit_s: float = 0.3
    """From there to refused connections; infinite: VLLM_KEEP_ALIVE_ON_ENGINE_DEATH."""


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What a generation asked for, checked."""

    max_tokens: int
    n: int
    draw: str
    ignore_eos: bool
    logprobs: int | None
    token_ids: bool
    stream: bool
    include_usage: bool


class SimulatedReplica:
    """One server. Use as an async context manager, or ``start`` and ``close``."""

    def __init__(
        self,
        config: ReplicaConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        folder: LaggingFolder | None = None,
        **overrides: Any,
    ) -> None:
        """``overrides`` are fields of ReplicaConfig or EngineConfig, for short calls in tests."""
        config = config or ReplicaConfig()
        engine_fields = {k: overrides.pop(k) for k in list(overrides) if k in _ENGINE_FIELDS}
        plain = {name: getattr(config, name) for name in ReplicaConfig.__dataclass_fields__}
        if engine_fields:
            plain["engine"] = EngineConfig(**asdict(config.engine) | engine_fields)
        self.config = ReplicaConfig(**plain | overrides)
        self.folder = folder
        self.exit_on_death = False
        self._read: Read = folder.read if folder is not None else _read_file
        self._server = Server(
            self._handle,
            host=host,
            port=port,
            keep_alive_s=self.config.keep_alive_s,
            uncancelled=_UNCANCELLED,
        )
        self._server.die = self.die
        self._routes = self._table()
        self._boot()

    def _boot(self) -> None:
        """The state of a server process that has just started."""
        self.engine = Engine(self.config.engine, self._reload)
        self.names: dict[str, Adapter] = {}
        """What /v1/models lists beside the base model, in the order of the loads."""
        self.weight_version = "default"
        self.sleeping = False
        self.updating = False
        self.transfer_ready = False
        self.instance_id = str(time.time_ns())
        self._started_s = time.time()
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._external: dict[str, list[str]] = {}
        self._waiters: dict[str, asyncio.Future[Outcome]] = {}
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._locks: dict[str, asyncio.Lock] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._down: list[asyncio.TimerHandle] = []
        self._dying = False
        self._died = False

    # For tests

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def faults(self) -> Faults:
        return self._server.faults

    @property
    def log(self) -> deque[Arrival]:
        """Every request since the start, oldest first; bounded."""
        return self._server.log

    def calls(self, path: str) -> list[Arrival]:
        """The requests of one path, oldest first."""
        return [arrival for arrival in self.log if arrival.path == path]

    @property
    def open_connections(self) -> int:
        return len(self._server.connections)

    @property
    def connections_made(self) -> int:
        return self._server.connections_made

    @property
    def in_flight(self) -> int:
        """Sequences that run or wait in the engine."""
        return len(self._waiters)

    def expected_tokens(self, model: str, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy reply of a model name as it is loaded here now."""
        adapter = self.names.get(model)
        weights = self.engine.base_weights if adapter is None else adapter.digest
        return tokens.reply_tokens(weights, prompt, "", count)

    async def start(self) -> None:
        await self._server.listen()

    async def close(self) -> None:
        self._stop_timers()
        await self._server.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def refuse(self) -> None:
        """Stop listening and reset the open connections: the host is there, no server is."""
        self._server.refuse()

    async def listen(self) -> None:
        """Undo ``refuse``: the same server, with all its state."""
        await self._server.listen()

    def die(self) -> None:
        """The engine's process is gone: who waits gets 500, then 503, then nobody listens."""
        if not self._dying and not self.engine.dead:
            self._dying = True
            loop = asyncio.get_running_loop()
            self._down.append(loop.call_later(self.config.notice_s, self._notice_death))

    async def restart(self) -> None:
        """A new process at the same address: no adapters, nothing paused, an empty cache."""
        self._server.refuse()
        self._stop_timers()
        for waiter in self._waiters.values():
            waiter.cancel()
        self._boot()
        await self._server.listen()

    def _notice_death(self) -> None:
        self.engine.advance(self._now())
        self.engine.die()
        self._pump()

    def _exit(self) -> None:
        self._server.refuse()
        if self.exit_on_death:
            os.kill(os.getpid(), signal.SIGTERM)

    def _stop_timers(self) -> None:
        for timer in (self._timer, *self._down):
            if timer is not None:
                timer.cancel()
        self._down.clear()

    # The engine in real time

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _pump(self) -> None:
        """Bring the engine to the present, hand out what ended, wake up for what is next."""
        engine, loop = self.engine, asyncio.get_running_loop()
        engine.advance(loop.time())
        for outcome in engine.take_outcomes():
            waiter = self._waiters.pop(outcome.job.id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(outcome)
        if not engine.busy():
            for idle in self._idle_waiters:
                if not idle.done():
                    idle.set_result(None)
            self._idle_waiters.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = engine.next_event_s()
        if next_s is not None:
            self._timer = loop.call_at(next_s, self._pump)
        if engine.dead and not self._died:
            self._died = True
            if self.config.exit_s != float("inf"):
                self._down.append(loop.call_later(self.config.exit_s, self._exit))

    def _reload(self, adapter: Adapter) -> str | None:
        try:
            return read_adapter(adapter.path, self.config.max_lora_rank, self._read)
        except (OSError, Unreadable):
            return None

    def _submit(self, job: Job) -> asyncio.Future[Outcome]:
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiters[job.id] = waiter
        self.engine.submit(self._now(), job)
        self._pump()
        return waiter

    def _abort(self, ids: Sequence[str] | None) -> int:
        count = self.engine.abort(self._now(), ids)
        self._pump()
        return count

    def _alive(self) -> None:
        if self.engine.dead:
            raise Refused(error(500, "InternalServerError", replies.ENGINE_DEAD))

    # One request

    async def _handle(self, arrival: Arrival) -> Reply:
        path = arrival.path
        if path.startswith(CONTROL):
            return await self._control(arrival)
        if self.config.bearer is not None:
            given = arrival.header("authorization")
            if given != f"Bearer {self.config.bearer}":
                page = b"<html><body><h1>401 Unauthorized</h1></body></html>"
                return Reply(401, page, "text/html")
        key = self.config.api_key
        if key is not None and path.startswith(_GUARDED):
            given = arrival.header("authorization")
            if given != f"Bearer {key}":
                return json_reply({"error": "Unauthorized"}, 401)
        methods = self._routes.get(path)
        if methods is None and path.startswith("/adapters/") and self.config.runtime_lora:
            methods = {"DELETE": self._delete_adapter}
        if methods is None:
            if path != "/" and path.rstrip("/") in self._routes:
                host = arrival.header("host") or f"{self._server.host}:{self.port}"
                query = arrival.target.partition("?")[2]
                target = f"http://{host}{path.rstrip('/')}" + (f"?{query}" if query else "")
                return Reply(307, b"", "", (("location", target),))
            return json_reply({"detail": "Not Found"}, 404)
        route = methods.get(arrival.method)
        if route is None:
            reply = json_reply({"detail": "Method Not Allowed"}, 405)
            return with_headers(reply, ("allow", ", ".join(methods)))
        try:
            return await route(arrival)
        except Refused as refused:
            return refused.reply

    def _table(self) -> dict[str, dict[str, Route]]:
        get, post = "GET", "POST"
        table: dict[str, dict[str, Route]] = {
            "/health": {get: self._health},
            "/ping": {get: self._health, post: self._health},
            "/version": {get: _constant({"version": "0.27.1"})},
            "/load": {get: _constant({"server_load": 0})},
            "/metrics": {get: self._metrics},
            "/v1/models": {get: self._models},
            "/v1/completions": {post: self._completions},
            "/v1/chat/completions": {post: self._chat},
            "/v1/messages": {post: self._messages},
            "/inference/v1/generate": {post: self._generate},
            "/tokenize": {post: self._tokenize},
            "/detokenize": {post: self._detokenize},
            "/v1/completions/render": {post: self._render},
            "/v1/chat/completions/render": {post: self._render},
            "/docs": {get: _page(b"<!DOCTYPE html><title>FastAPI - Swagger UI</title>")},
            "/openapi.json": {get: _constant({"openapi": "3.1.0", "paths": {}})},
        }
        if self.config.runtime_lora:
            table |= {
                "/v1/load_lora_adapter": {post: self._load_adapter},
                "/v1/unload_lora_adapter": {post: self._unload_adapter},
                "/adapters": {post: self._post_adapter},
            }
        if self.config.dev_mode:
            table |= {
                "/pause": {post: self._pause},
                "/resume": {post: self._resume},
                "/is_paused": {get: self._is_paused},
                "/abort_requests": {post: self._abort_requests},
                "/reset_prefix_cache": {post: self._reset_prefix_cache},
                "/reset_mm_cache": {post: self._reset_other_cache},
                "/reset_encoder_cache": {post: self._reset_other_cache},
                "/sleep": {post: self._sleep},
                "/wake_up": {post: self._wake_up},
                "/is_sleeping": {get: self._is_sleeping},
                "/server_info": {get: self._server_info},
                "/get_world_size": {get: self._world_size},
                "/init_weight_transfer_engine": {post: self._init_transfer},
                "/start_weight_update": {post: self._start_update},
                "/update_weights": {post: self._update_weights},
                "/finish_weight_update": {post: self._finish_update},
                "/weight_info": {get: self._weight_info},
                "/update_weight_version": {post: self._update_version},
                "/collective_rpc": {post: self._collective_rpc},
            }
        return table

    # Facts about the server

    async def _health(self, arrival: Arrival) -> Reply:
        return Reply(503 if self.engine.dead else 200, b"", "")

    async def _metrics(self, arrival: Arrival) -> Reply:
        self._pump()
        page = replies.metrics(self.engine, self.config.model, self._started_s, time.time())
        return Reply(200, page.encode(), "text/plain; version=1.0.0; charset=utf-8")

    async def _models(self, arrival: Arrival) -> Reply:
        base = self.config.model
        cards = [
            replies.model_card(base, self.config.root or base, None, self.config.max_model_len)
        ]
        cards += [replies.model_card(a.name, a.path, base, None) for a in self.names.values()]
        return json_reply({"object": "list", "data": cards})

    async def _server_info(self, arrival: Arrival) -> Reply:
        form = _choice(arrival, "config_format", ("text", "json"))
        return json_reply(
            replies.server_info(
                model=self.config.model,
                dtype=self.config.dtype,
                max_model_len=self.config.max_model_len,
                engine=self.engine,
                max_lora_rank=self.config.max_lora_rank if self.config.lora else None,
                data_parallel_size=self.config.data_parallel_size,
                weight_transfer=self.config.weight_transfer,
                instance_id=self.instance_id,
                as_json=form == "json",
            )
        )

    async def _world_size(self, arrival: Arrival) -> Reply:
        whole = _flag(arrival, "include_dp", True)
        return json_reply({"world_size": self.config.data_parallel_size if whole else 1})

    # Adapters

    async def _load_adapter(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival)
        name, path = _strings(body, "lora_name", "lora_path")
        inplace = _body_flag(body, "load_inplace")
        _body_flag(body, "is_3d_lora_weight")
        return await self._load(name, path, inplace)

    async def _load(self, name: str, path: str, inplace: bool) -> Reply:
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not name or not path:
                text = "Both 'lora_name' and 'lora_path' must be provided."
                return error(400, "InvalidUserInput", text)
            known = self.names.get(name)
            if known is not None and not inplace:
                text = (
                    f"The lora adapter '{name}' has already been loaded. If you want to load "
                    "the adapter in place, set 'load_inplace' to True."
                )
                return error(400, "InvalidUserInput", text)
            self._alive()
            if not self.config.lora:
                text = "LoRA is not enabled. Use --enable-lora to enable LoRA."
                return replies.worker_failed("add_lora", text)
            try:
                digest = read_adapter(path, self.config.max_lora_rank, self._read)
            except FileNotFoundError:
                text = f"Loading lora {name} failed: No adapter found for {path}"
                return error(404, "NotFoundError", text)
            except Unreadable as trouble:
                return replies.worker_failed("add_lora", str(trouble))
            number = next(self._numbers) if known is None else known.number
            adapter = Adapter(number, name, path, digest)
            self.engine.add_adapter(self._now(), adapter)
            self._pump()
            if self.config.engine.load_s:
                await asyncio.sleep(self.config.engine.load_s)
            self._alive()
            self.names[name] = adapter
            return replies.text_reply(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, arrival: Arrival) -> Reply:
        (name,) = _strings(_json_object(arrival), "lora_name")
        return self._unload(name)

    def _unload(self, name: str) -> Reply:
        if not name:
            text = "'lora_name' needs to be provided to unload a LoRA adapter."
            return error(400, "InvalidUserInput", text)
        if name not in self.names:
            return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.names[name]
        return replies.text_reply(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _post_adapter(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival)
        name, path = _strings(body, "name", "src")
        reply = await self._load(name, path, _body_flag(body, "load_inplace"))
        done = reply.status == 200
        return replies.text_reply(f"Adapter {name} registered") if done else reply

    async def _delete_adapter(self, arrival: Arrival) -> Reply:
        name = arrival.path.removeprefix("/adapters/")
        reply = self._unload(name)
        done = reply.status == 200
        return replies.text_reply(f"Adapter {name} unregistered") if done else reply

    # Pause, sleep, caches

    async def _pause(self, arrival: Arrival) -> Reply:
        mode = _choice(arrival, "mode", ("abort", "wait", "keep"))
        if _flag(arrival, "wait_for_inflight_requests", False):
            mode = "wait"
        clear = _flag(arrival, "clear_cache", True)
        self._alive_or("pause generation")
        self.engine.pause(self._now(), mode, clear)
        self._pump()
        if mode == "wait":
            while self.engine.busy():
                await self._idle()
            if clear:
                self.engine.reset_prefix_cache(self._now())
            self._pump()
        return json_reply({"status": "paused"})

    async def _idle(self) -> None:
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle_waiters.append(idle)
        await idle

    async def _resume(self, arrival: Arrival) -> Reply:
        self._alive_or("resume generation")
        self.engine.resume(self._now())
        self._pump()
        return json_reply({"status": "resumed"})

    async def _is_paused(self, arrival: Arrival) -> Reply:
        self._alive_or("fetch pause status")
        return json_reply({"is_paused": self.engine.paused is not Pause.NONE})

    def _alive_or(self, what: str) -> None:
        if self.engine.dead:
            text = f"Failed to {what}: {replies.ENGINE_DEAD}"
            raise Refused(json_reply({"error": text}, 500))

    async def _abort_requests(self, arrival: Arrival) -> Reply:
        ids = _loose_json(arrival).get("request_ids")
        if ids:
            self._abort([i for external in ids for i in self._external.get(external, ())])
            return json_reply({"status": "aborted", "aborted": len(ids)})
        return json_reply({"status": "aborted", "aborted": self._abort(None)})

    async def _reset_prefix_cache(self, arrival: Arrival) -> Reply:
        running = _flag(arrival, "reset_running_requests", False)
        _flag(arrival, "reset_external", False)
        self._alive()
        success = self.engine.reset_prefix_cache(self._now(), running)
        self._pump()
        return json_reply({"success": success})

    async def _reset_other_cache(self, arrival: Arrival) -> Reply:
        self._alive()
        return Reply(200, b"", "")

    async def _sleep(self, arrival: Arrival) -> Reply:
        query = arrival.query
        try:
            level = int(query.get("level", "1"))
        except ValueError as trouble:
            raise bad_request(str(trouble)) from trouble
        self._alive()
        self.engine.pause(self._now(), query.get("mode", "abort"), clear_cache=level > 0)
        self._pump()
        self.sleeping = True
        return Reply(200, b"", "")

    async def _wake_up(self, arrival: Arrival) -> Reply:
        self._alive()
        self.sleeping = False
        self.engine.resume(self._now())
        self._pump()
        return Reply(200, b"", "")

    async def _is_sleeping(self, arrival: Arrival) -> Reply:
        self._alive()
        return json_reply({"is_sleeping": self.sleeping})

    # Weights in place

    def _needs_transfer(self) -> None:
        self._alive()
        if not self.config.weight_transfer:
            text = (
                "Weight transfer not configured. Please set weight_transfer_config to enable "
                "weight transfer."
            )
            raise Refused(_rpc_failed(text))

    async def _init_transfer(self, arrival: Arrival) -> Reply:
        info = _loose_json(arrival).get("init_info")
        if info is None:
            raise _detail("Missing 'init_info' in request body")
        self._needs_transfer()
        self.transfer_ready = True
        return json_reply({"message": "Weight transfer initialized"})

    async def _start_update(self, arrival: Arrival) -> Reply:
        self._needs_transfer()
        if self.updating:
            text = "Weight update session already active."
            raise Refused(_rpc_failed(text))
        self.updating = True
        return json_reply({"message": "Weight update started"})

    async def _update_weights(self, arrival: Arrival) -> Reply:
        if _loose_json(arrival).get("update_info") is None:
            raise _detail("Missing 'update_info' in request body")
        self._needs_transfer()
        if not self.updating:
            raise self._no_session()
        self.engine.update_base_weights(self._now())
        self._pump()
        return json_reply({"message": "Weights updated"})

    async def _finish_update(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival) if arrival.body else {}
        self._needs_transfer()
        if not self.updating:
            raise self._no_session()
        self.updating = False
        if body.get("weight_version") is not None:
            self.weight_version = str(body["weight_version"])
        return json_reply({"message": "Weight update finished"})

    @staticmethod
    def _no_session() -> Refused:
        return Refused(_rpc_failed("No active weight update session."))

    async def _weight_info(self, arrival: Arrival) -> Reply:
        self._alive()
        return json_reply({"weight_version": self.weight_version})

    async def _update_version(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival, embedded=True)
        if "new_version" not in body:
            raise invalid(missing(("body", "new_version"), None))
        self._alive()
        self.weight_version = str(body["new_version"])
        return json_reply({"success": True, "new_version": self.weight_version})

    async def _collective_rpc(self, arrival: Arrival) -> Reply:
        try:
            body = json.loads(arrival.body)
        except ValueError as trouble:
            raise _detail(f"JSON decode error: {trouble}") from trouble
        method = body.get("method")
        if method is None:
            raise _detail("Missing 'method' in request body")
        self._alive()
        if method == "list_loras":
            return json_reply({"results": [list(self.engine.adapters)]})
        text = f"'CPUWorker' object has no attribute '{method}'"
        return _rpc_failed(text)

    # Tokens without an engine

    async def _tokenize(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival)
        if "prompt" not in body and "messages" not in body:
            place = ("body", "function-wrap[__log_extra_fields__()]")
            raise invalid(*(missing((*place, key), body) for key in ("prompt", "messages")))
        self._check_model(body)
        if "messages" in body:
            ids = tokens.chat_tokens(_conversation(body["messages"]))
        else:
            ids = tokens.encode(body["prompt"])
        shown = [tokens.decode([i]) for i in ids] if body.get("return_token_strs") else None
        return json_reply(
            {
                "count": len(ids),
                "max_model_len": self.config.max_model_len,
                "tokens": ids,
                "token_strs": shown,
            }
        )

    async def _detokenize(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival)
        if "tokens" not in body:
            raise invalid(missing(("body", "tokens"), body))
        self._check_model(body)
        return json_reply({"prompt": tokens.decode(body["tokens"])})

    async def _render(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival)
        self._check_model(body)
        limits: dict[str, Any] = {}
        if "messages" in body:
            kind, ids = "chatcmpl", [tokens.chat_tokens(_conversation(body["messages"]))]
            limits["max_tokens"] = self.config.max_model_len - len(ids[0])
        else:
            kind, ids = "cmpl", _prompts(body.get("prompt") or "")
        shown = [
            replies.rendered(f"{kind}-{secrets.token_hex(8)}", one, self.config.model, limits)
            for one in ids
        ]
        return json_reply(shown if kind == "cmpl" else shown[0])

    # Generation

    def _check_model(self, body: Mapping[str, Any]) -> Adapter | None:
        """The adapter a request names, None for the base. Adapters come first, as in vLLM."""
        name = body.get("model")
        if name in self.names:
            return self.names[name]
        if name and name != self.config.model:
            raise replies.unknown_model(name)
        return None

    def _sampling(
        self, body: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> _Sampling:
        """Checks in vLLM's order (sampling_params.py, _verify_args)."""
        n = body.get("n", 1)
        limit = self.config.max_model_len
        if max_tokens is not None and max_tokens > limit:
            text = (
                f"max_tokens={max_tokens} cannot be greater than max_model_len="
                f"max_total_tokens={limit}. Please request fewer output tokens."
            )
            raise bad_request(text, "max_tokens", max_tokens)
        if n is not None and n < 1:
            raise bad_request(f"n must be at least 1, got {n}.")
        temperature = 1.0 if body.get("temperature") is None else float(body["temperature"])
        if temperature < 0:
            text = f"temperature must be non-negative, got {temperature}."
            raise bad_request(text, "temperature", temperature)
        top_p = 1.0 if body.get("top_p") is None else float(body["top_p"])
        if not 0 < top_p <= 1:
            raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
        if max_tokens is not None and max_tokens < 1:
            text = f"max_tokens must be at least 1, got {max_tokens}."
            raise bad_request(text, "max_tokens", max_tokens)
        least = body.get("min_tokens") or 0
        if max_tokens is not None and least > max_tokens:
            raise bad_request(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}."
            )
        if logprobs is not None and logprobs > 20:
            text = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: 20"
            raise bad_request(text, "logprobs", logprobs)
        seed = body.get("seed")
        draw = ""
        if temperature:
            draw = f"seed {seed}" if seed is not None else f"draw {next(self._ids)}"
        return _Sampling(
            max_tokens=max_tokens or 0,
            n=n or 1,
            draw=draw,
            ignore_eos=bool(body.get("ignore_eos")),
            logprobs=logprobs,
            token_ids=bool(body.get("return_token_ids")),
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def _check_length(self, prompt: Sequence[int], max_tokens: int) -> None:
        limit = self.config.max_model_len
        if len(prompt) + max_tokens > limit:
            text = (
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {len(prompt)} input tokens, "
                f"for a total of {len(prompt) + max_tokens} tokens. Please reduce the length of "
                "the input prompt or the number of requested output tokens."
            )
            raise bad_request(text, "input_tokens", len(prompt))
        worst = max(prompt, default=0)
        if worst >= self.config.vocab_size:
            raise bad_request(f"Token id {worst} is out of vocabulary")

    def _begin(
        self,
        external: str,
        adapter: Adapter | None,
        prompts: Sequence[Sequence[int]],
        sampling: _Sampling,
    ) -> list[_Generation]:
        self._alive()
        name = adapter.name if adapter is not None else ""
        generations: list[_Generation] = []
        for prompt in prompts:
            blocks = chain(name, prompt, self.config.engine.block_tokens)
            for i in range(sampling.n):
                draw = f"{sampling.draw} {i}" if sampling.draw else ""
                length, reason = sampling.max_tokens, "length"
                mean = self.config.mean_output_tokens
                if mean is not None and not sampling.ignore_eos:
                    natural = tokens.reply_length(prompt, draw, mean)
                    if natural <= length:
                        length, reason = natural, "stop"
                number = len(generations)
                job = Job(
                    f"{external}-{number}-{next(self._ids)}",
                    blocks,
                    len(prompt),
                    length,
                    adapter,
                    reason,
                )
                generations.append(_Generation(job, prompt, draw))
                self._external.setdefault(f"{external}-{number}", []).append(job.id)
        for generation in generations:
            generation.done = self._submit(generation.job)
        return generations

    async def _end(self, external: str, generations: Sequence[_Generation]) -> list[Outcome]:
        """Wait for all; if the client leaves meanwhile, they are aborted."""
        try:
            outcomes = [await g.done for g in generations]
        finally:
            self._forget(external, generations)
        if any(o.reason == "error" for o in outcomes):
            raise Refused(error(500, "InternalServerError", replies.ENGINE_DEAD))
        for generation, outcome in zip(generations, outcomes, strict=True):
            self._remember(generation, outcome)
        return outcomes

    def _forget(self, external: str, generations: Sequence[_Generation]) -> None:
        open_ids = [g.job.id for g in generations if g.job.id in self._waiters]
        if open_ids:
            for i in open_ids:
                self._waiters.pop(i).cancel()
            self._abort(open_ids)
        for number in range(len(generations)):
            self._external.pop(f"{external}-{number}", None)

    def _remember(self, generation: _Generation, outcome: Outcome) -> None:
        """Blocks filled by the reply are cached too: the next turn's prompt starts with them."""
        size = self.config.engine.block_tokens
        if (outcome.job.prompt_tokens + outcome.tokens) // size > len(outcome.job.blocks):
            name = outcome.job.adapter.name if outcome.job.adapter is not None else ""
            whole = [*generation.prompt, *_tokens(generation, outcome)]
            self.engine.store(chain(name, whole, size), outcome.weights)

    async def _completions(self, arrival: Arrival) -> Reply:
        body = _json_body(arrival)
        if not isinstance(body, dict):
            kind = type(body).__name__
            text = f"'{kind}' object has no attribute 'get'"
            return replies.raised(error(500, "InternalServerError", text))
        if not body.get("prompt") and body.get("prompt") != []:
            text = "Either prompt or prompt_embeds must be provided and non-empty."
            raise bad_request(text, "prompt")
        _check_prompt(body["prompt"])
        _check_seed(body)
        adapter = self._check_model(body)
        prompts = _prompts(body["prompt"])
        if not prompts:
            raise bad_request("You must pass at least one prompt")
        if not all(prompts):
            raise bad_request("The decoder prompt cannot be empty")
        given = body.get("max_tokens")
        sampling = self._sampling(body, 16 if given is None else given, body.get("logprobs"))
        for prompt in prompts:
            self._check_length(prompt, sampling.max_tokens)
        request_id = body.get("request_id") or arrival.header("x-request-id")
        external = f"cmpl-{request_id or secrets.token_hex(8)}"
        generations = self._begin(external, adapter, prompts, sampling)
        base: dict[str, Any] = {
            "id": external,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or self.config.model,
        }
        if sampling.stream:
            pieces = self._stream_completion(external, base, generations, sampling, len(prompts))
            return Reply(200, b"", "text/event-stream; charset=utf-8", (), pieces)
        outcomes = await self._end(external, generations)
        choices = []
        for i, (generation, outcome) in enumerate(zip(generations, outcomes, strict=True)):
            ids = _tokens(generation, outcome)
            choices.append(
                {
                    "index": i,
                    "text": tokens.decode(ids),
                    "logprobs": _completion_logprobs(generation, outcome, sampling.logprobs),
                    "finish_reason": outcome.reason,
                    "stop_reason": None,
                    "token_ids": ids if sampling.token_ids else None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": generation.prompt if sampling.token_ids else None,
                    "routed_experts": None,
                }
            )
        read = sum(map(len, prompts))
        reply = json_reply(
            base
            | {
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": replies.FINGERPRINT,
                "usage": replies.usage(read, sum(o.tokens for o in outcomes)),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )
        return self._with_load(arrival, reply)

    def _with_load(self, arrival: Arrival, reply: Reply) -> Reply:
        """The per-response load that a request header asks for."""
        form = (arrival.header("endpoint-load-metrics-format") or "").upper()
        waiting, usage = float(self.engine.gauges.waiting), self.engine.gauges.kv_usage
        if form == "JSON":
            load = {
                "named_metrics": {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
            }
            return with_headers(reply, ("endpoint-load-metrics", f"JSON {json.dumps(load)}"))
        if form == "TEXT":
            text = (
                f"TEXT named_metrics.num_requests_waiting={waiting}, "
                f"named_metrics.kv_cache_usage_perc={usage}"
            )
            return with_headers(reply, ("endpoint-load-metrics", text))
        return reply

    async def _progress(
        self, external: str, generations: Sequence[_Generation]
    ) -> AsyncIterator[tuple[int, int, Outcome | None]]:
        """(choice, token number, outcome with the last token); token -1: ended without one."""
        sent = [0] * len(generations)
        open_choices = set(range(len(generations)))
        try:
            while open_choices:
                waiting = [generations[i].done for i in open_choices]
                # Several steps may fit into one turn; no need to wake up for each.
                pace_s = max(self.engine.step_s(), 0.002)
                await asyncio.wait(waiting, timeout=pace_s, return_when="FIRST_COMPLETED")
                self._pump()
                for i in sorted(open_choices):
                    generation = generations[i]
                    outcome = generation.done.result() if generation.done.done() else None
                    if outcome is None:
                        there = self.engine.produced(generation.job.id)
                        there = min(there, generation.job.output_tokens - 1)
                        generation.weights = self.engine.weights(generation.job.id)
                    else:
                        generation.weights = outcome.weights
                        there = outcome.tokens
                        open_choices.discard(i)
                    for number in range(sent[i], there):
                        last = outcome if number == there - 1 else None
                        yield i, number, last
                    if outcome is not None and sent[i] >= there:
                        yield i, -1, outcome
                    sent[i] = max(sent[i], there)
                    if outcome is not None:
                        self._remember(generation, outcome)
        finally:
            self._forget(external, generations)

    async def _stream_completion(
        self,
        external: str,
        base: dict[str, Any],
        generations: Sequence[_Generation],
        sampling: _Sampling,
        prompts: int,
    ) -> AsyncIterator[bytes]:
        written = 0
        async for i, number, outcome in self._progress(external, generations):
            generation = generations[i]
            if outcome is not None and outcome.reason == "error":
                yield _event(
                    orjson.loads(error(500, "InternalServerError", replies.ENGINE_DEAD).body)
                )
                yield b"data: [DONE]\n\n"
                return
            ids = [generation.token(number)] if number >= 0 else []
            written += len(ids)
            logprobs = None
            if sampling.logprobs is not None and ids:
                logprobs = _logprob_lists(generation, number, number + 1, sampling.logprobs)
            content: dict[str, Any] = base | {
                "choices": [
                    {
                        "index": i,
                        "text": tokens.decode(ids),
                        "logprobs": logprobs,
                        "finish_reason": outcome.reason if outcome is not None else None,
                        "stop_reason": None,
                        "prompt_token_ids": (
                            generation.prompt if sampling.token_ids and number == 0 else None
                        ),
                        "token_ids": ids if sampling.token_ids else None,
                    }
                ]
            }
            if outcome is not None and not sampling.include_usage:
                content["system_fingerprint"] = replies.FINGERPRINT
            yield _event(content)
        if sampling.include_usage:
            read = sum(len(g.prompt) for g in generations) // sampling.n
            counts = replies.usage(read, written, details=False)
            yield _event(
                base | {"choices": [], "usage": counts, "system_fingerprint": replies.FINGERPRINT}
            )
        yield b"data: [DONE]\n\n"

    def _start_chat(
        self, body: Mapping[str, Any], arrival: Arrival
    ) -> tuple[str, _Sampling, list[int], list[_Generation]]:
        if "messages" not in body:
            raise invalid(missing(("body", "messages"), body))
        _check_seed(body)
        adapter = self._check_model(body)
        conversation = _conversation(body["messages"])
        if not conversation:
            raise bad_request(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        prompt = tokens.chat_tokens(conversation)
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        rest = max(self.config.max_model_len - len(prompt), 1)
        top = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        sampling = self._sampling(body, rest if given is None else given, top)
        self._check_length(prompt, sampling.max_tokens)
        request_id = body.get("request_id") or arrival.header("x-request-id")
        external = f"chatcmpl-{request_id or secrets.token_hex(8)}"
        return external, sampling, prompt, self._begin(external, adapter, [prompt], sampling)

    async def _chat(self, arrival: Arrival) -> Reply:
        body = _json_object(arrival)
        external, sampling, prompt, generations = self._start_chat(body, arrival)
        base: dict[str, Any] = {
            "id": external,
            "object": "chat.completion.chunk" if sampling.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or self.config.model,
        }
        if sampling.stream:
            pieces = self._stream_chat(external, base, generations, sampling)
            return Reply(200, b"", "text/event-stream; charset=utf-8", (), pieces)
        outcomes = await self._end(external, generations)
        choices = []
        for i, (generation, outcome) in enumerate(zip(generations, outcomes, strict=True)):
            ids = _tokens(generation, outcome)
            choices.append(
                {
                    "index": i,
                    "message": {
                        "role": "assistant",
                        "content": tokens.decode(ids),
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "reasoning": None,
                    },
                    "logprobs": _chat_logprobs(generation, 0, len(ids), sampling.logprobs),
                    "finish_reason": outcome.reason,
                    "stop_reason": None,
                    "token_ids": ids if sampling.token_ids else None,
                    "routed_experts": None,
                }
            )
        return self._with_load(
            arrival,
            json_reply(
                base
                | {
                    "choices": choices,
                    "service_tier": None,
                    "system_fingerprint": replies.FINGERPRINT,
                    "usage": replies.usage(len(prompt), sum(o.tokens for o in outcomes)),
                    "prompt_logprobs": None,
                    "prompt_token_ids": prompt if sampling.token_ids else None,
                    "prompt_text": None,
                    "kv_transfer_params": None,
                    "ec_transfer_params": None,
                    "metrics": None,
                }
            ),
        )

    async def _stream_chat(
        self,
        external: str,
        base: dict[str, Any],
        generations: Sequence[_Generation],
        sampling: _Sampling,
    ) -> AsyncIterator[bytes]:
        first = True
        written = 0
        async for i, number, outcome in self._progress(external, generations):
            generation = generations[i]
            if first:
                first = False
                for j, other in enumerate(generations):
                    start = {
                        "index": j,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                    shown = other.prompt if sampling.token_ids else None
                    yield _event(
                        base | {"choices": [start], "prompt_token_ids": shown, "prompt_text": None}
                    )
            if outcome is not None and outcome.reason == "error":
                yield _event(
                    orjson.loads(error(500, "InternalServerError", replies.ENGINE_DEAD).body)
                )
                yield b"data: [DONE]\n\n"
                return
            ids = [generation.token(number)] if number >= 0 else []
            written += len(ids)
            choice: dict[str, Any] = {
                "index": i,
                "delta": {"content": tokens.decode(ids)},
                "logprobs": _chat_logprobs(generation, number, number + 1, sampling.logprobs)
                if ids
                else None,
                "finish_reason": None,
            }
            content: dict[str, Any] = base | {"choices": [choice]}
            if outcome is not None:
                choice |= {"finish_reason": outcome.reason, "stop_reason": None}
            if outcome is not None and not sampling.include_usage:
                content["system_fingerprint"] = replies.FINGERPRINT
            choice["token_ids"] = ids if sampling.token_ids else None
            yield _event(content)
        if sampling.include_usage:
            counts = replies.usage(len(generations[0].prompt), written, details=False)
            yield _event(
                base | {"choices": [], "usage": counts, "system_fingerprint": replies.FINGERPRINT}
            )
        yield b"data: [DONE]\n\n"

    async def _messages(self, arrival: Arrival) -> Reply:
        """Anthropic's shape; no streaming here."""
        body = _json_object(arrival)
        try:
            external, _, prompt, generations = self._start_chat(body, arrival)
            (outcome,) = await self._end(external, generations)
        except Refused as refused:
            detail = orjson.loads(refused.reply.body)["error"]
            shown = {"type": detail["type"], "message": detail["message"]}
            return json_reply({"type": "error", "error": shown}, refused.reply.status)
        reason = {"length": "max_tokens", "stop": "end_turn"}.get(outcome.reason)
        text = tokens.decode(_tokens(generations[0], outcome))
        return json_reply(
            {
                "id": external,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": body.get("model") or self.config.model,
                **({"stop_reason": reason} if reason is not None else {}),
                "usage": {"input_tokens": len(prompt), "output_tokens": outcome.tokens},
            }
        )

    async def _generate(self, arrival: Arrival) -> Reply:
        """vLLM's own token-in, token-out endpoint; no streaming here."""
        body = _json_object(arrival)
        if "token_ids" not in body:
            raise invalid(missing(("body", "token_ids"), body))
        adapter = self._check_model(body)
        given = body.get("sampling_params") or {}
        sampling = self._sampling(given, given.get("max_tokens") or 16, given.get("logprobs"))
        self._check_length(body["token_ids"], sampling.max_tokens)
        external = f"generate-tokens-{secrets.token_hex(8)}"
        generations = self._begin(external, adapter, [body["token_ids"]], sampling)
        outcomes = await self._end(external, generations)
        choices = []
        for i, (generation, outcome) in enumerate(zip(generations, outcomes, strict=True)):
            ids = _tokens(generation, outcome)
            shown = None
            if sampling.logprobs is not None:
                values = generation.logprobs(len(ids))
                one = [
                    {"token": f"token_id:{t}", "logprob": v, "bytes": None}
                    for t, v in zip(ids, values, strict=True)
                ]
                shown = {"content": [e | {"top_logprobs": [e]} for e in one]}
            choices.append(
                {
                    "index": i,
                    "logprobs": shown,
                    "finish_reason": outcome.reason,
                    "token_ids": ids,
                    "routed_experts": None,
                }
            )
        return json_reply(
            {
                "request_id": external,
                "model": body.get("model") or self.config.model,
                "created": int(time.time()),
                "choices": choices,
                "usage": replies.usage(len(body["token_ids"]), sum(o.tokens for o in outcomes)),
                "prompt_logprobs": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
            }
        )

    # Remote control

    async def _control(self, arrival: Arrival) -> Reply:
        what = (arrival.method, arrival.path.removeprefix(CONTROL))
        body = orjson.loads(arrival.body) if arrival.body else {}
        match what:
            case ("GET", "log"):
                return json_reply([_shown(a) for a in self.log])
            case ("DELETE", "log"):
                self.log.clear()
            case ("POST", "faults"):
                place = {k: body.pop(k) for k in ("method", "nth", "times") if k in body}
                path = body.pop("path")
                body["body"] = str(body.get("body", "")).encode()
                self.faults.add(path, Fault(**body), **place)
            case ("DELETE", "faults"):
                self.faults.clear()
            case ("GET", "state"):
                return json_reply(self._state())
            case ("POST", "die"):
                self.die()
            case ("POST", "restart"):
                self._server.own(self.restart())
            case ("POST", "refuse"):
                self._server.own(self._refuse_for(float(body.get("for_s", 1))))
            case _:
                return json_reply({"detail": "Not Found"}, 404)
        return json_reply({"ok": True})

    async def _refuse_for(self, seconds: float) -> None:
        self.refuse()
        await asyncio.sleep(seconds)
        await self.listen()

    def _state(self) -> dict[str, Any]:
        self._pump()
        return {
            "adapters": {a.name: {"path": a.path, "digest": a.digest} for a in self.names.values()},
            "in_memory": [a.name for a in self.engine.adapters.values()],
            "paused": self.engine.paused.value,
            "alive": not self.engine.dead,
            "in_flight": self.in_flight,
            "connections": self.open_connections,
            "counters": asdict(self.engine.counters),
        }


@dataclass(slots=True, eq=False)
class _Generation:
    """One choice of one request while it is made."""

    job: Job
    prompt: Sequence[int]
    draw: str
    weights: str = ""
    done: asyncio.Future[Outcome] = field(init=False)
    _made: tuple[str, list[int]] = ("", [])

    def token(self, number: int) -> int:
        """Token ``number`` under the weights known by now."""
        if self._made[0] != self.weights or len(self._made[1]) <= number:
            length = max(self.job.output_tokens, number + 1)
            made = tokens.reply_tokens(self.weights, self.prompt, self.draw, length)
            if self.job.reason == "stop":
                made[-1] = tokens.IM_END
            self._made = (self.weights, made)
        return self._made[1][number]

    def logprobs(self, count: int) -> list[float]:
        return tokens.logprobs(self.weights, self.prompt, self.draw, count)


def _tokens(generation: _Generation, outcome: Outcome) -> list[int]:
    generation.weights = outcome.weights
    return [generation.token(number) for number in range(outcome.tokens)]


def _logprob_lists(generation: _Generation, start: int, end: int, top: int) -> dict[str, Any]:
    """Log-probabilities of tokens ``start`` to ``end`` as /v1/completions shows them."""
    values = generation.logprobs(end)[start:end]
    texts = [tokens.decode([generation.token(i)]) for i in range(start, end)]
    offsets = list(itertools.accumulate((len(t) for t in texts), initial=0))[:-1]
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": [
            {text: value} | {f"{k}": value - 1 - k for k in range(top) if f"{k}" != text}
            for text, value in zip(texts, values, strict=True)
        ],
    }


def _completion_logprobs(
    generation: _Generation, outcome: Outcome, top: int | None
) -> dict[str, Any] | None:
    return None if top is None else _logprob_lists(generation, 0, outcome.tokens, top)


def _chat_logprobs(
    generation: _Generation, start: int, end: int, top: int | None
) -> dict[str, Any] | None:
    if top is None:
        return None
    values = generation.logprobs(end)[start:end]
    content = []
    for number, value in zip(range(start, end), values, strict=True):
        piece = tokens.piece(generation.token(number))
        entry = {"token": piece.decode("utf-8", "replace"), "logprob": value, "bytes": list(piece)}
        others = [
            {"token": f"{k}", "logprob": value - 1 - k, "bytes": [48 + k]} for k in range(top - 1)
        ]
        content.append(entry | {"top_logprobs": [entry, *others][:top]})
    return {"content": content}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


def _constant(content: object) -> Route:
    async def answer(arrival: Arrival) -> Reply:
        return json_reply(content)

    return answer


def _page(body: bytes) -> Route:
    async def answer(arrival: Arrival) -> Reply:
        return Reply(200, body, "text/html; charset=utf-8")

    return answer


# What FastAPI and vLLM check before a handler sees a request


def _json_body(arrival: Arrival) -> Any:
    """The parsed body of an endpoint that insists on JSON."""
    kind = (arrival.header("content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(error(400, "Bad Request", text))
    return _parsed(arrival)


def _parsed(arrival: Arrival) -> Any:
    if not arrival.body:
        raise invalid(missing(("body",), None))
    try:
        return json.loads(arrival.body)
    except json.JSONDecodeError as trouble:
        raise invalid(
            {
                "type": "json_invalid",
                "loc": ("body", trouble.pos),
                "msg": "JSON decode error",
                "input": {},
                "ctx": {"error": trouble.msg},
            }
        ) from trouble


def _json_object(arrival: Arrival, *, embedded: bool = False) -> dict[str, Any]:
    """``embedded``: a single field in the body, which FastAPI reads whatever its type is."""
    body = _parsed(arrival) if embedded else _json_body(arrival)
    if not isinstance(body, dict):
        raise invalid(
            {
                "type": "model_attributes_type",
                "loc": ("body",),
                "msg": "Input should be a valid dictionary or object to extract fields from",
                "input": body,
            }
        )
    return body


def _rpc_failed(text: str) -> Reply:
    return replies.raised(replies.worker_failed("collective_rpc", text))


def _detail(text: str) -> Refused:
    return Refused(error(400, "Bad Request", text))


def _loose_json(arrival: Arrival) -> dict[str, Any]:
    """The body of the handlers that parse it themselves (dev/rlhf/api_router.py)."""
    try:
        body: dict[str, Any] = json.loads(arrival.body)
    except ValueError as trouble:
        raise _detail("Invalid JSON format") from trouble
    return body


def _strings(body: Mapping[str, Any], *names: str) -> list[str]:
    errors: list[Mapping[str, object]] = []
    for name in names:
        if name not in body:
            errors.append(missing(("body", name), dict(body)))
        elif not isinstance(body[name], str):
            errors.append(
                {
                    "type": "string_type",
                    "loc": ("body", name),
                    "msg": "Input should be a valid string",
                    "input": body[name],
                }
            )
    if errors:
        raise invalid(*errors)
    return [body[name] for name in names]


def _bool(place: tuple[str, str], given: object) -> bool:
    text = str(given).lower()
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise invalid(
        {
            "type": "bool_parsing",
            "loc": place,
            "msg": "Input should be a valid boolean, unable to interpret input",
            "input": given,
        }
    )


def _body_flag(body: Mapping[str, Any], name: str) -> bool:
    return _bool(("body", name), body.get(name, False))


def _flag(arrival: Arrival, name: str, default: bool) -> bool:
    return _bool(("query", name), arrival.query.get(name, default))


def _choice(arrival: Arrival, name: str, choices: Sequence[str]) -> str:
    """A query parameter that is one of ``choices``; the first is the default."""
    given = arrival.query.get(name, choices[0])
    if given not in choices:
        quoted = [f"'{c}'" for c in choices]
        expected = " or ".join([", ".join(quoted[:-1]), quoted[-1]])
        raise invalid(
            {
                "type": "literal_error",
                "loc": ("query", name),
                "msg": f"Input should be {expected}",
                "input": given,
                "ctx": {"expected": expected},
            }
        )
    return given


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _check_prompt(prompt: Any) -> None:
    """A prompt of a type vLLM does not know: pydantic tells what each member of the union wants."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and (
        all(map(_is_token, prompt))
        or all(isinstance(p, str) for p in prompt)
        or all(isinstance(p, list) and all(map(_is_token, p)) for p in prompt)
    ):
        return
    errors: list[Mapping[str, object]] = []

    def wrong(kind: str, msg: str, given: object, *place: object, **context: object) -> None:
        entry: dict[str, object] = {"type": kind, "loc": ("body", "prompt", *place), "msg": msg}
        errors.append(entry | {"input": given} | ({"ctx": context} if context else {}))

    no_list, no_string = "Input should be a valid list", "Input should be a valid string"
    number, lists, strings = "list[constrained-int]", "list[list[constrained-int]]", "list[str]"
    if not isinstance(prompt, list):
        wrong("list_type", no_list, prompt, number)
        wrong("list_type", no_list, prompt, lists)
        wrong("string_type", no_string, prompt, "str")
        wrong("list_type", no_list, prompt, strings)
        raise invalid(*errors)
    for i, item in enumerate(prompt):
        if isinstance(item, int) and item < 0:
            msg = "Input should be greater than or equal to 0"
            wrong("greater_than_equal", msg, item, number, i, ge=0)
        elif isinstance(item, str):
            msg = "Input should be a valid integer, unable to parse string as an integer"
            wrong("int_parsing", msg, item, number, i)
        elif not isinstance(item, int):
            wrong("int_type", "Input should be a valid integer", item, number, i)
    for i, item in enumerate(prompt):
        if not isinstance(item, list):
            wrong("list_type", no_list, item, lists, i)
    wrong("string_type", no_string, prompt, "str")
    for i, item in enumerate(prompt):
        if not isinstance(item, str):
            wrong("string_type", no_string, item, strings, i)
    raise invalid(*errors)


def _check_seed(body: Mapping[str, Any]) -> None:
    seed = body.get("seed")
    if isinstance(seed, int) and seed > 2**63 - 1:
        raise invalid(
            {
                "type": "less_than_equal",
                "loc": ("body", "seed"),
                "msg": f"Input should be less than or equal to {2**63 - 1}",
                "input": seed,
                "ctx": {"le": 2**63 - 1},
            }
        )


def _prompts(prompt: Any) -> list[list[int]]:
    """A completion's prompt in any of its forms as lists of token ids."""
    if isinstance(prompt, str):
        return [tokens.encode(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return [tokens.encode(p) if isinstance(p, str) else p for p in prompt]


def _conversation(messages: Any) -> list[tuple[str, str]]:
    """Roles and texts; of content parts only the text."""
    out = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        out.append((message.get("role", "user"), content))
    return out


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def _shown(arrival: Arrival) -> dict[str, Any]:
    return {
        "number": arrival.number,
        "connection": arrival.connection,
        "at_s": arrival.at_s,
        "method": arrival.method,
        "target": arrival.target,
        "headers": arrival.headers,
        "body": arrival.body.decode("utf-8", "replace"),
        "answered_s": arrival.answered_s,
        "status": arrival.status,
        "disconnected_s": arrival.disconnected_s,
    }


_ENGINE_FIELDS = frozenset(EngineConfig.__dataclass_fields__)
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
# Their handlers lack vLLM's with_cancellation: a client that leaves does not stop them.
_UNCANCELLED = frozenset(
    (
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/update_weights",
        "/start_weight_update",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
    )
)


# Command line


def _arguments() -> argparse.ArgumentParser:
    engine, config = EngineConfig(), ReplicaConfig()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replica",
        description="A simulated vLLM 0.27.1 server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0: a free one, printed")
    add("--model", default=config.model, help="name of the base model")
    add("--max-model-len", type=int, default=config.max_model_len, help="tokens")
    add("--vocab-size", type=int, default=config.vocab_size, help="token ids")
    add("--max-lora-rank", type=int, default=config.max_lora_rank, help="highest rank accepted")
    add("--max-loras", type=int, default=engine.max_loras, help="adapters running at once")
    add("--max-cpu-loras", type=int, default=engine.max_cpu_loras, help="adapters in memory")
    add("--max-num-seqs", type=int, default=engine.max_num_seqs, help="sequences at once")
    add("--block-size", type=int, default=engine.block_tokens, help="tokens per cache block")
    add("--num-blocks", type=int, default=engine.num_blocks, help="blocks of prefix cache")
    add("--step-s", type=float, default=engine.step_s, help="seconds per decode step")
    add("--step-per-seq-s", type=float, default=engine.step_per_seq_s, help="and per sequence")
    add("--prefill-token-s", type=float, default=engine.prefill_token_s, help="s per prompt token")
    add("--load-s", type=float, default=engine.load_s, help="seconds an adapter load takes")
    add("--mean-output-tokens", type=int, default=None, help="replies end by themselves")
    add("--api-key", default=None, help="what /v1 and the like demand")
    add("--bearer", default=None, help="what an edge in front demands on every path")
    add("--no-lora", action="store_true", help="started without --enable-lora")
    add("--no-runtime-lora", action="store_true", help="without runtime LoRA updating")
    add("--no-dev-mode", action="store_true", help="without VLLM_SERVER_DEV_MODE")
    add("--weight-transfer", action="store_true", help="with --weight-transfer-config")
    add("--keep-alive-s", type=float, default=config.keep_alive_s, help="idle connections")
    add("--bucket", default=None, metavar="DIR", help="show DIR through a mount that lags")
    add("--lag-s", type=float, default=2.5, help="the mount's lag, seconds")
    add("--negative-ttl-s", type=float, default=1.0, help="how long it remembers a miss, seconds")
    return parser


def _from_arguments(args: argparse.Namespace) -> SimulatedReplica:
    folder = None
    if args.bucket is not None:
        folder = LaggingFolder(args.bucket, args.lag_s, args.negative_ttl_s)
    config = ReplicaConfig(
        model=args.model,
        max_model_len=args.max_model_len,
        vocab_size=args.vocab_size,
        max_lora_rank=args.max_lora_rank,
        lora=not args.no_lora,
        runtime_lora=not args.no_runtime_lora,
        dev_mode=not args.no_dev_mode,
        weight_transfer=args.weight_transfer,
        api_key=args.api_key,
        bearer=args.bearer,
        keep_alive_s=args.keep_alive_s,
        mean_output_tokens=args.mean_output_tokens,
        engine=EngineConfig(
            block_tokens=args.block_size,
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_loras=args.max_loras,
            max_cpu_loras=args.max_cpu_loras,
            step_s=args.step_s,
            step_per_seq_s=args.step_per_seq_s,
            prefill_token_s=args.prefill_token_s,
            load_s=args.load_s,
        ),
    )
    return SimulatedReplica(config, host=args.host, port=args.port, folder=folder)


async def _run(replica: SimulatedReplica) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    replica.exit_on_death = True
    async with replica:
        print(replica.url, flush=True)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death. The first line printed is the URL."""
    args = _arguments().parse_args(argv)
    try:
        asyncio.run(_run(_from_arguments(args)))
    except OSError as trouble:
        print(f"cannot listen on {args.host}:{args.port}: {trouble}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

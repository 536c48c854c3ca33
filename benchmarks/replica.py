"""A simulated vLLM 0.27.1 server: real HTTP and real answers, over the engine model.

    async with SimulatedReplica() as replica:          # in a test; many fit in one event loop
        replica.url, replica.faults, replica.log, replica.engine

    python -m benchmarks.replica --port 8001           # as a process; /sim/* is its remote control

What a reply says depends on who computed it: its tokens are a function of the adapter's bytes
(or the base model), the prompt and the position. ``expected_tokens`` tells what it must be.
Adapter directories are really read, optionally through a ``LaggingFolder``. With a push key it
takes adapters over its port as well, by ``deploy/replica/rollmux_push.py``.

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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from benchmarks import replies, tokens
from benchmarks.adapter import Read, Unreadable, read_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.checks import (
    body_flag,
    choice,
    detail,
    flag,
    json_object,
    loose_json,
    strings,
    token_prompts,
    turns,
)
from benchmarks.config import ReplicaConfig
from benchmarks.driver import Driver
from benchmarks.engine import Adapter, Engine, EngineConfig, Pause
from benchmarks.generations import Generations
from benchmarks.httpd import CONTROL, Arrival, Fault, Faults, Reply, Server, with_headers
from benchmarks.push import PushEndpoint, PushSettings
from benchmarks.replies import Refused, bad_request, error, invalid, json_reply, missing
from deploy.replica.rollmux_push import DEFAULT_ROOT

Route = Callable[[Arrival], Awaitable[Reply]]


class SimulatedReplica:
    """One server. Use as an async context manager, or ``start`` and ``close``."""

    def __init__(
        self,
        config: ReplicaConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        folder: LaggingFolder | None = None,
        push_key: str | None = None,
        push_root: Path | str = DEFAULT_ROOT,
        push_max_mb: int = 2048,
        **overrides: Any,
    ) -> None:
        """``overrides`` are fields of ReplicaConfig or EngineConfig, for short calls in tests.

        With ``push_key`` adapters can be pushed, into a folder of its own below ``push_root``.
        """
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
        self._push_settings = (
            PushSettings(push_key, Path(push_root), push_max_mb) if push_key else None
        )
        self._push: PushEndpoint | None = None
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
        self._locks: dict[str, asyncio.Lock] = {}
        self._down: list[asyncio.TimerHandle] = []
        self._dying = False
        self.driver = Driver(self.engine, self._on_death)
        self._generations = Generations(self.config, self.driver, self.names)
        self._routes = self._table()
        if self._push is not None:
            self._push.close(keep_files=True)
        if self._push_settings is not None:
            names = self.names
            self._push = PushEndpoint(
                self._push_settings, lambda: {a.name: a.path for a in list(names.values())}
            )

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
        return self.driver.in_flight

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
        if self._push is not None:
            self._push.close()
            self._push = None

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

    async def kill(self) -> None:
        """The whole process is gone at once, as by SIGKILL; ``restart`` is the next one."""
        self._stop_timers()
        await self._server.close()

    async def restart(self) -> None:
        """A new process at the same address: no adapters, nothing paused, an empty cache.

        What was pushed to the old one is removed, as a new process does with a dead one's files.
        """
        self._server.refuse()
        self._stop_timers()
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
        for timer in self._down:
            timer.cancel()
        self._down.clear()
        self.driver.stop()

    def _now(self) -> float:
        return self.driver.now()

    def _pump(self) -> None:
        self.driver.pump()

    def _on_death(self) -> None:
        if self.config.exit_s != float("inf"):
            loop = asyncio.get_running_loop()
            self._down.append(loop.call_later(self.config.exit_s, self._exit))

    def _reload(self, adapter: Adapter) -> str | None:
        try:
            return read_adapter(adapter.path, self.config.max_lora_rank, self._read)
        except (OSError, Unreadable):
            return None

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
        if self._push is not None and self._push.serves(path):
            # Outermost in vLLM too, before its key. Work on files goes on when a client leaves.
            return await asyncio.shield(self._server.own(self._push.answer(arrival)))
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
        except (TypeError, ValueError, AttributeError) as trouble:
            # A field of another type than was expected: vLLM's models refuse it, as does this.
            return replies.error(400, "Bad Request", f"1 validation error: {trouble}")

    def _table(self) -> dict[str, dict[str, Route]]:
        get, post = "GET", "POST"
        table: dict[str, dict[str, Route]] = {
            "/health": {get: self._health},
            "/ping": {get: self._health, post: self._health},
            "/version": {get: _constant({"version": "0.27.1"})},
            "/load": {get: _constant({"server_load": 0})},
            "/metrics": {get: self._metrics},
            "/v1/models": {get: self._models},
            "/v1/completions": {post: self._generations.completions},
            "/v1/chat/completions": {post: self._generations.chat},
            "/v1/messages": {post: self._generations.messages},
            "/inference/v1/generate": {post: self._generations.generate},
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
        form = choice(arrival, "config_format", ("text", "json"))
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
        whole = flag(arrival, "include_dp", True)
        return json_reply({"world_size": self.config.data_parallel_size if whole else 1})

    # Adapters

    async def _load_adapter(self, arrival: Arrival) -> Reply:
        body = json_object(arrival)
        name, path = strings(body, "lora_name", "lora_path")
        inplace = body_flag(body, "load_inplace")
        body_flag(body, "is_3d_lora_weight")
        return await self._load(name, path, inplace)

    async def _load(self, name: str, path: str, inplace: bool) -> Reply:
        names = self.names  # of this life: after a restart a late load must not land in the next
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not name or not path:
                text = "Both 'lora_name' and 'lora_path' must be provided."
                return error(400, "InvalidUserInput", text)
            known = names.get(name)
            if known is not None and not inplace:
                text = (
                    f"The lora adapter '{name}' has already been loaded. If you want to load "
                    "the adapter in place, set 'load_inplace' to True."
                )
                return error(400, "InvalidUserInput", text)
            self._generations.alive()
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
            self._generations.alive()
            names[name] = adapter
            return replies.text_reply(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, arrival: Arrival) -> Reply:
        (name,) = strings(json_object(arrival), "lora_name")
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
        body = json_object(arrival)
        name, path = strings(body, "name", "src")
        reply = await self._load(name, path, body_flag(body, "load_inplace"))
        done = reply.status == 200
        return replies.text_reply(f"Adapter {name} registered") if done else reply

    async def _delete_adapter(self, arrival: Arrival) -> Reply:
        name = arrival.path.removeprefix("/adapters/")
        reply = self._unload(name)
        done = reply.status == 200
        return replies.text_reply(f"Adapter {name} unregistered") if done else reply

    # Pause, sleep, caches

    async def _pause(self, arrival: Arrival) -> Reply:
        mode = choice(arrival, "mode", ("abort", "wait", "keep"))
        if flag(arrival, "wait_for_inflight_requests", False):
            mode = "wait"
        clear = flag(arrival, "clear_cache", True)
        self._alive_or("pause generation")
        self.engine.pause(self._now(), mode, clear)
        self._pump()
        if mode == "wait":
            await self.driver.idle()
            if clear:
                self.engine.reset_prefix_cache(self._now())
            self._pump()
        return json_reply({"status": "paused"})

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
        ids = loose_json(arrival).get("request_ids")
        if ids:
            known = self._generations.external
            self.driver.abort([i for external in ids for i in known.get(external, ())])
            return json_reply({"status": "aborted", "aborted": len(ids)})
        return json_reply({"status": "aborted", "aborted": self.driver.abort(None)})

    async def _reset_prefix_cache(self, arrival: Arrival) -> Reply:
        running = flag(arrival, "reset_running_requests", False)
        flag(arrival, "reset_external", False)
        self._generations.alive()
        success = self.engine.reset_prefix_cache(self._now(), running)
        self._pump()
        return json_reply({"success": success})

    async def _reset_other_cache(self, arrival: Arrival) -> Reply:
        self._generations.alive()
        return Reply(200, b"", "")

    async def _sleep(self, arrival: Arrival) -> Reply:
        query = arrival.query
        try:
            level = int(query.get("level", "1"))
        except ValueError as trouble:
            raise bad_request(str(trouble)) from trouble
        self._generations.alive()
        self.engine.pause(self._now(), query.get("mode", "abort"), clear_cache=level > 0)
        self._pump()
        self.sleeping = True
        return Reply(200, b"", "")

    async def _wake_up(self, arrival: Arrival) -> Reply:
        self._generations.alive()
        self.sleeping = False
        self.engine.resume(self._now())
        self._pump()
        return Reply(200, b"", "")

    async def _is_sleeping(self, arrival: Arrival) -> Reply:
        self._generations.alive()
        return json_reply({"is_sleeping": self.sleeping})

    # Weights in place

    def _needs_transfer(self) -> None:
        self._generations.alive()
        if not self.config.weight_transfer:
            text = (
                "Weight transfer not configured. Please set weight_transfer_config to enable "
                "weight transfer."
            )
            raise Refused(_rpc_failed(text))

    async def _init_transfer(self, arrival: Arrival) -> Reply:
        info = loose_json(arrival).get("init_info")
        if info is None:
            raise detail("Missing 'init_info' in request body")
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
        if loose_json(arrival).get("update_info") is None:
            raise detail("Missing 'update_info' in request body")
        self._needs_transfer()
        if not self.updating:
            raise self._no_session()
        self.engine.update_base_weights(self._now())
        self._pump()
        return json_reply({"message": "Weights updated"})

    async def _finish_update(self, arrival: Arrival) -> Reply:
        body = json_object(arrival) if arrival.body else {}
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
        self._generations.alive()
        return json_reply({"weight_version": self.weight_version})

    async def _update_version(self, arrival: Arrival) -> Reply:
        body = json_object(arrival, embedded=True)
        if "new_version" not in body:
            raise invalid(missing(("body", "new_version"), None))
        self._generations.alive()
        self.weight_version = str(body["new_version"])
        return json_reply({"success": True, "new_version": self.weight_version})

    async def _collective_rpc(self, arrival: Arrival) -> Reply:
        try:
            body = json.loads(arrival.body)
        except ValueError as trouble:
            raise detail(f"JSON decode error: {trouble}") from trouble
        method = body.get("method")
        if method is None:
            raise detail("Missing 'method' in request body")
        self._generations.alive()
        if method == "list_loras":
            return json_reply({"results": [list(self.engine.adapters)]})
        text = f"'CPUWorker' object has no attribute '{method}'"
        return _rpc_failed(text)

    # Tokens without an engine

    async def _tokenize(self, arrival: Arrival) -> Reply:
        body = json_object(arrival)
        if "prompt" not in body and "messages" not in body:
            place = ("body", "function-wrap[__log_extra_fields__()]")
            raise invalid(*(missing((*place, key), body) for key in ("prompt", "messages")))
        self._generations.check_model(body)
        if "messages" in body:
            ids = tokens.chat_tokens(turns(body["messages"]))
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
        body = json_object(arrival)
        if "tokens" not in body:
            raise invalid(missing(("body", "tokens"), body))
        self._generations.check_model(body)
        return json_reply({"prompt": tokens.decode(body["tokens"])})

    async def _render(self, arrival: Arrival) -> Reply:
        body = json_object(arrival)
        self._generations.check_model(body)
        limits: dict[str, Any] = {}
        if "messages" in body:
            kind, ids = "chatcmpl", [tokens.chat_tokens(turns(body["messages"]))]
            limits["max_tokens"] = self.config.max_model_len - len(ids[0])
        else:
            kind, ids = "cmpl", token_prompts(body.get("prompt") or "")
        shown = [
            replies.rendered(f"{kind}-{secrets.token_hex(8)}", one, self.config.model, limits)
            for one in ids
        ]
        return json_reply(shown if kind == "cmpl" else shown[0])

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


def _rpc_failed(text: str) -> Reply:
    return replies.raised(replies.worker_failed("collective_rpc", text))


def _constant(content: object) -> Route:
    async def answer(arrival: Arrival) -> Reply:
        return json_reply(content)

    return answer


def _page(body: bytes) -> Route:
    async def answer(arrival: Arrival) -> Reply:
        return Reply(200, body, "text/html; charset=utf-8")

    return answer


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
    add("--push-key", default=None, help="take pushed adapters from who shows this key")
    add("--push-root", default=DEFAULT_ROOT, metavar="DIR", help="where pushed adapters are kept")
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
    return SimulatedReplica(
        config,
        host=args.host,
        port=args.port,
        folder=folder,
        push_key=args.push_key,
        push_root=args.push_root,
    )


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

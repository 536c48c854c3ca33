"""The bodies of vLLM 0.27.1's answers, byte for byte but for what only a real model knows.

Recorded from vLLM 0.27.1 (CPU build); tests/e2e/test_conformance.py compares each with a real
server. ``Refused`` carries an answer out of the middle of a handler.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from benchmarks.engine import Engine
from benchmarks.httpd import Reply

FINGERPRINT = "vllm-0.27.1-00000000"
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Refused(Exception):
    """A handler's work ends here with this answer."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status, reply.body)
        self.reply = reply


def json_reply(content: object, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(content))


def text_reply(text: str) -> Reply:
    """vLLM's success texts carry no content type."""
    return Reply(200, text.encode(), content_type="")


def sanitize(message: str) -> str:
    """Paths hidden as in vLLM 0.27.1, entrypoints/serve/utils/api_utils.py, sanitize_message."""
    message = re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", "<path>", message)
    return re.sub(r"(?:/[\w\-]+)+/[\w\-]+\.\w+", "<path>", message).strip()


def error(status: int, kind: str, message: str, param: str | None = None) -> Reply:
    return json_reply(
        {
            "error": {
                "message": sanitize(message),
                "type": kind,
                "param": param,
                "code": status,
            }
        },
        status,
    )


def bad_request(message: str, param: str | None = None, value: object = None) -> Refused:
    """A request vLLM itself refuses; ``param`` and ``value`` also go into the message."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return Refused(error(400, "BadRequestError", message, param))


def unknown_model(name: object) -> Refused:
    message = f"The model `{name}` does not exist."
    return Refused(error(404, "NotFoundError", message, "model"))


def worker_failed(method: str, text: str) -> Reply:
    message = (
        f"Call to {method} method failed: Worker failed with error '{text}', "
        "please check the stack trace above for the root cause"
    )
    return error(500, "InternalServerError", message)


def raised(reply: Reply) -> Reply:
    """The answer to an exception nobody expected: uvicorn then closes the connection.

    Starlette's ServerErrorMiddleware answers 500 and raises again; uvicorn 0.x, httptools_impl.py,
    run_asgi closes the transport for that, without a ``connection: close`` before.
    """
    return replace(reply, close=True)


def invalid(*errors: Mapping[str, object]) -> Refused:
    """FastAPI's validation errors as vLLM words them. Each has type, loc, msg, input (and ctx)."""
    lines = "".join(f"\n  {dict(e)}" for e in errors)
    location = errors[0]["loc"]
    assert isinstance(location, tuple)
    # The name of a union's member is not part of the parameter's path.
    path = ".".join(str(p) for p in location if "[" not in str(p) and p != "str")
    plural = "s" if len(errors) > 1 else ""
    return Refused(
        error(400, "Bad Request", f"{len(errors)} validation error{plural}:{lines}", path)
    )


def missing(location: Sequence[object], given: object) -> dict[str, object]:
    return {
        "type": "missing",
        "loc": tuple(location),
        "msg": "Field required",
        "input": given,
    }


def model_card(name: str, root: str, parent: str | None, max_model_len: int | None) -> object:
    now = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{secrets.token_hex(8)}",
                "object": "model_permission",
                "created": now,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def usage(prompt_tokens: int, completion_tokens: int, *, details: bool = True) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return counts | {"prompt_tokens_details": None} if details else counts


def rendered(
    request_id: str, token_ids: Sequence[int], model: str, limits: Mapping[str, object]
) -> object:
    """What /render makes of one prompt under default sampling."""
    return {
        "request_id": request_id,
        "token_ids": token_ids,
        "assistant_tokens_mask": None,
        "token_offsets": None,
        "features": None,
        "sampling_params": {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "stop": [],
            "stop_token_ids": [],
            **limits,
            "output_kind": 2,
            "skip_clone": True,
            "bad_words": [],
            "skip_reading_prefix_cache": False,
        },
        "model": model,
        "stream": False,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def server_info(
    *,
    model: str,
    dtype: str,
    max_model_len: int,
    engine: Engine,
    max_lora_rank: int | None,
    data_parallel_size: int,
    weight_transfer: bool,
    instance_id: str,
    as_json: bool,
) -> object:
    """What /server_info tells; of the real 22 kB only what somebody might read."""
    config = engine.config
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True, "VLLM_SERVER_DEV_MODE": True}
    system = {"torch_version": "2.13.0", "is_debug_build": "False"}
    if not as_json:
        text = (
            f"model='{model}', speculative_config=None, tokenizer='{model}', "
            f"dtype={dtype}, max_seq_len={max_model_len}, tensor_parallel_size=1, "
            f"data_parallel_size={data_parallel_size}, enable_prefix_caching=True"
        )
        return {"vllm_config": text, "vllm_env": environment, "system_env": system}
    lora = max_lora_rank and {
        "max_lora_rank": max_lora_rank,
        "max_loras": config.max_loras,
        "fully_sharded_loras": False,
        "max_cpu_loras": config.max_cpu_loras,
        "lora_dtype": dtype,
        "target_modules": None,
        "default_mm_loras": None,
    }
    return {
        "vllm_config": {
            "model_config": {
                "model": model,
                "tokenizer": model,
                "dtype": dtype,
                "seed": 0,
                "max_model_len": max_model_len,
                "max_logprobs": 20,
                "logprobs_mode": "processed_logprobs",
                "served_model_name": model,
                "generation_config": "vllm",
            },
            "cache_config": {
                "block_size": config.block_tokens,
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": "sha256",
                "num_gpu_blocks": config.num_blocks,
                "kv_cache_size_tokens": config.num_blocks * config.block_tokens,
            },
            "parallel_config": {
                "pipeline_parallel_size": 1,
                "tensor_parallel_size": 1,
                "data_parallel_size": data_parallel_size,
                "data_parallel_rank": 0,
                "world_size": 1,
                "rank": 0,
            },
            "scheduler_config": {
                "runner_type": "generate",
                "max_num_seqs": config.max_num_seqs,
                "enable_chunked_prefill": True,
                "policy": "fcfs",
            },
            "lora_config": lora or None,
            "speculative_config": None,
            "kv_transfer_config": None,
            "kv_events_config": None,
            "instance_id": instance_id,
            "weight_transfer_config": {"backend": "nccl"} if weight_transfer else None,
        },
        "vllm_env": environment,
        "system_env": system,
    }


def metrics(engine: Engine, model: str, started_s: float, now_s: float) -> str:
    """The metrics page: names, types, help texts and labels of vLLM 0.27.1; no histograms."""
    base = f'engine="0",model_name="{model}"'
    counters, gauges = engine.counters, engine.gauges
    families: list[tuple[str, str, str, list[tuple[str, object]]]] = [
        (
            "num_requests_running",
            "gauge",
            "Number of requests in model execution batches.",
            [("", gauges.running)],
        ),
        (
            "num_requests_waiting",
            "gauge",
            "Number of requests waiting to be processed.",
            [("", gauges.waiting)],
        ),
        (
            "num_requests_waiting_by_reason",
            "gauge",
            "Number of waiting requests by reason.",
            [
                (',reason="capacity"', gauges.waiting - gauges.deferred),
                (',reason="deferred"', gauges.deferred),
            ],
        ),
        (
            "engine_sleep_state",
            "gauge",
            "Engine sleep state.",
            [
                (',sleep_state="awake"', 1),
                (',sleep_state="weights_offloaded"', 0),
                (',sleep_state="discard_all"', 0),
            ],
        ),
        (
            "kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            [("", gauges.kv_usage)],
        ),
        (
            "prefix_cache_queries_total",
            "counter",
            "Prefix cache queries, in terms of number of queried tokens.",
            [("", counters.prefix_queries)],
        ),
        (
            "prefix_cache_hits_total",
            "counter",
            "Prefix cache hits, in terms of number of cached tokens.",
            [("", counters.prefix_hits)],
        ),
        (
            "num_preemptions_total",
            "counter",
            "Cumulative number of preemption from the engine.",
            [("", counters.preemptions)],
        ),
        (
            "prompt_tokens_total",
            "counter",
            "Number of prefill tokens processed.",
            [("", counters.prompt_tokens)],
        ),
        (
            "prompt_tokens_by_source_total",
            "counter",
            "Number of prompt tokens by source.",
            [
                (',source="local_compute"', counters.prompt_tokens - counters.prefix_hits),
                (',source="local_cache_hit"', counters.prefix_hits),
                (',source="external_kv_transfer"', 0),
            ],
        ),
        (
            "generation_tokens_total",
            "counter",
            "Number of generation tokens processed.",
            [("", engine.generated())],
        ),
    ]
    lines: list[str] = []
    for name, kind, text, samples in families:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
        lines += [f"vllm:{name}{{{base}{more}}} {float(str(v))}" for more, v in samples]
    lines += [
        "# HELP vllm:request_success_total Count of successfully processed requests.",
        "# TYPE vllm:request_success_total counter",
        *(
            f'vllm:request_success_total{{engine="0",finished_reason="{reason}",'
            f'model_name="{model}"}} {float(count)}'
            for reason, count in counters.finished.items()
        ),
        "# HELP vllm:lora_requests_info Running stats on lora requests.",
        "# TYPE vllm:lora_requests_info gauge",
        f'vllm:lora_requests_info{{max_lora="{engine.config.max_loras}",'
        f'running_lora_adapters="{",".join(sorted(engine.running_adapters()))}",'
        f'waiting_lora_adapters="{",".join(sorted(engine.waiting_adapters()))}"}} {now_s}',
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{engine.config.block_tokens}",'
        f'enable_prefix_caching="True",engine="0",'
        f'num_gpu_blocks="{engine.config.num_blocks}"}} 1.0',
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_s}",
    ]
    return "\n".join(lines) + "\n"

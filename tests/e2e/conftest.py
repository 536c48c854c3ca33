"""The real parts of the end-to-end tests: environment, tiny model, replicas, Prometheus."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e import environment
from tests.e2e.processes import Process, environment_with, free_port, running, wait_for_health

# Of its engine: vLLM picks a free port and listens there half a minute later. Below those that the
# kernel gives to connections, nobody takes it meanwhile; each server scans from one of its own.
ENGINE_PORTS = itertools.count(20_000, 20)
START_S = 240.0  # two engines at once on two busy cores took 45 to 90 s


@dataclass(frozen=True, slots=True)
class RealParts:
    """Where the real software lies."""

    env: Path
    model: Path
    problems: Path

    @property
    def python(self) -> Path:
        return environment.python_of(self.env)

    def child_environment(self, **changes: str) -> dict[str, str]:
        """For a child that imports torch: one thread each, no network, caches beside the parts."""
        return environment_with(
            HF_HUB_OFFLINE="1", HF_HOME=str(self.env / "hf"), OMP_NUM_THREADS="1", **changes
        )


@pytest.fixture(scope="session")
def real_parts() -> RealParts:
    """The built environment; building it is not a test's business, nor inside its time limit."""
    env = environment.default_dir()
    if not environment.is_ready(env):
        pytest.fail(f"{env} is not built: run `python tests/e2e/environment.py` first", False)
    tiny = environment.tiny_model_of(env)
    return RealParts(env, tiny / "model", tiny / "problems.jsonl")


@contextlib.contextmanager
def replica_running(
    parts: RealParts,
    log: Path,
    options: Sequence[str] = (),
    *,
    before: Sequence[str | Path] = (),
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Process]]:
    """One vLLM server, started but not yet waited for: (its URL, the process).

    `before` comes first on its command line: see `lagging_mount.seen_at`. `environ` is added to
    its environment.
    """
    port = port or free_port()
    env = parts.child_environment(
        VLLM_SERVER_DEV_MODE="1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_PORT=str(next(ENGINE_PORTS)),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        **(environ or {}),
    )
    command = [
        *before,
        parts.env / "bin" / "vllm",
        "serve",
        parts.model,
        *("--host", "127.0.0.1", "--port", str(port)),
        # The trainer's own precision: what is left between the two is rounding.
        *("--dtype", "float32", "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm", "--max-model-len", "1024", "--max-num-seqs", "64"),
        # Six slots is what TRL asks for (max_staleness + 2). The spare copies in memory keep vLLM
        # from reading a retired adapter's files again (contract 3.2).
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "6", "--max-cpu-loras", "16"),
        # The CPU build's default block is 128 tokens, longer than these prompts.
        *("--enforce-eager", "--block-size", "16"),
        *options,
    ]
    with running(f"vLLM on port {port}", command, env, log) as process:
        yield f"http://127.0.0.1:{port}", process


@pytest.fixture(scope="session")
def replicas(
    real_parts: RealParts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """URLs of two real vLLM servers that nobody else uses, for the whole session."""
    logs = tmp_path_factory.mktemp("replicas")
    with (
        replica_running(real_parts, logs / "0.log") as (first, first_process),
        replica_running(real_parts, logs / "1.log") as (second, second_process),
    ):
        wait_for_health(first_process, f"{first}/health", START_S)
        wait_for_health(second_process, f"{second}/health", START_S)
        yield first, second


@contextlib.contextmanager
def prometheus_running(parts: RealParts, target: str, directory: Path) -> Iterator[str]:
    """A Prometheus server that scrapes `target` (host:port) every half second; yields its URL."""
    config = directory / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
        "scrape_configs:\n"
        f"  - {{job_name: rollmux, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    server, _ = environment.prometheus_of(parts.env)
    port = free_port()
    command = [
        server,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = directory / "prometheus.log"
    with running("Prometheus", command, environment_with(), log) as process:
        wait_for_health(process, f"http://127.0.0.1:{port}/-/ready", 30)
        yield f"http://127.0.0.1:{port}"


def prometheus_values(url: str, query: str) -> list[float]:
    """One value per series that `query` finds."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10, trust_env=False)
    answer.raise_for_status()
    return [float(series["value"][1]) for series in answer.json()["data"]["result"]]

"""The main job with adapters pushed to replicas that see nothing of the trainer's disk."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.adapter import write_adapter
from tests.e2e.conftest import START_S, RealParts, replica_running
from tests.e2e.lagging_mount import lagging_mount, missing_for_mounts, seen_at
from tests.e2e.main_job import COMPLETIONS, LOAD, UNLOAD, adapters_of, call, judge, run_job
from tests.e2e.processes import (
    ROOT,
    Process,
    environment_with,
    free_port,
    running,
    wait_for_health,
    wait_until,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600, func_only=True),
    pytest.mark.skipif(bool(missing_for_mounts()), reason=missing_for_mounts()),
]
KEY = "key-of-these-tests"
PUSHED = {"ROLLMUX_PUSH_KEY": KEY}
STEPS, PUBLICATIONS = 12, 7
LAG_S, NEGATIVE_TTL_S = 2.5, 1.0
READY_S = 120.0


@dataclass(slots=True)
class Replica:
    """A vLLM server with the push endpoint, to which `hidden` is an empty folder."""

    parts: RealParts
    directory: Path
    hidden: Path
    port: int = field(default_factory=free_port)
    lives: int = 0
    process: Process | None = None
    life: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def root(self) -> Path:
        """Where it keeps what is pushed to it."""
        return self.directory / "pushed"

    def start(self) -> None:
        """Not waited for."""
        self.lives += 1
        empty = self.directory / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        variables = [
            *("env", f"PYTHONPATH={ROOT / 'deploy' / 'replica'}", f"ROLLMUX_PUSH_KEY={KEY}"),
            f"ROLLMUX_PUSH_ROOT={self.root}",
        ]
        _, self.process = self.life.enter_context(
            replica_running(
                self.parts,
                self.directory / f"{self.lives}.log",
                ("--middleware", "rollmux_push.AdapterPush"),
                before=[*seen_at(empty, self.hidden), *variables],
                port=self.port,
            )
        )

    def wait(self) -> None:
        assert self.process
        wait_for_health(self.process, f"{self.url}/health", START_S)

    def paths(self) -> dict[str, Path]:
        """Where each adapter that it lists was loaded from."""
        cards = httpx.get(f"{self.url}/v1/models", timeout=10, trust_env=False).json()["data"]
        return {card["id"]: Path(card["root"]) for card in cards if card["parent"]}


@dataclass(frozen=True, slots=True)
class Pair:
    replicas: tuple[Replica, Replica]
    trainer: Path  # a folder that neither can see

    @property
    def urls(self) -> tuple[str, str]:
        first, second = self.replicas
        return first.url, second.url


@pytest.fixture(scope="module")
def pair(real_parts: RealParts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pushed")
    trainer = directory / "trainer"
    trainer.mkdir()
    first, second = (Replica(real_parts, directory / str(i), trainer) for i in range(2))
    with ExitStack() as stack:
        for replica in (first, second):
            stack.enter_context(replica.life)
            replica.start()
        for replica in (first, second):
            replica.wait()
        yield Pair((first, second), trainer)


def pushed_bytes(metrics: str) -> list[float]:
    found = re.findall(r'^rollmux_pushed_bytes_total\{replica="r\d"\} (\S+)$', metrics, re.M)
    return [float(value) for value in found]


def test_trainer_runs_to_its_end_where_no_replica_sees_its_disk(
    real_parts: RealParts, pair: Pair, tmp_path: Path
) -> None:
    out = pair.trainer / "out"
    options = ("--adapter-transport", "push", "--push-cache", str(tmp_path / "cache"))
    run = run_job(real_parts, pair.urls, tmp_path, out=out, options=options, secrets=PUSHED)
    judge(run, pair.urls[0], steps=STEPS, publications=PUBLICATIONS)
    sent = pushed_bytes(run.daemon_metrics)
    assert len(sent) == 2
    assert min(sent) > 0
    assert not list(out.rglob(".rollmux")), "copies were written where nobody reads them"
    waits = re.findall(r"(trl-policy-v\d+) published in (\S+) s", run.output)
    print(f"load calls: {waits}")


def test_one_replica_on_push_and_one_on_a_mount_that_lags(
    real_parts: RealParts, pair: Pair, tmp_path: Path
) -> None:
    pushed = pair.replicas[0]
    folder = pair.trainer / "bucket"
    folder.mkdir()
    with ExitStack() as stack:
        mount = stack.enter_context(lagging_mount(folder, LAG_S, NEGATIVE_TTL_S))
        url, process = stack.enter_context(
            replica_running(real_parts, tmp_path / "late.log", before=seen_at(mount, folder))
        )
        wait_for_health(process, f"{url}/health", START_S)
        cache = ("--push-cache", str(tmp_path / "cache"))
        out = folder / "out"
        urls = pushed.url, url
        run = run_job(real_parts, urls, tmp_path, out=out, options=cache, secrets=PUSHED)
        judge(run, pushed.url, steps=STEPS, publications=PUBLICATIONS)
    assert len(pushed_bytes(run.daemon_metrics)) == 1


def test_killed_replica_is_back_with_every_live_adapter_though_their_files_are_gone(
    pair: Pair, tmp_path: Path
) -> None:
    first, second = pair.replicas
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "proxy", "serve", "--port", str(port)),
        *("--replica", first.url, "--replica", second.url, "--adapter-transport", "push"),
        *("--push-cache", str(tmp_path / "cache")),
    ]
    with running(
        "rollmux serve", command, environment_with(**PUSHED), tmp_path / "daemon.log"
    ) as daemon:
        wait_for_health(daemon, f"{url}/health", READY_S)
        names = [f"trl-policy-v{number}" for number in range(101, 104)]
        for name in names:
            path = write_adapter(pair.trainer / name, name, modules=("q_proj", "o_proj"))
            call(url, LOAD, {"lora_name": name, "lora_path": str(path)})
            shutil.rmtree(path)
        before = second.paths()
        assert second.process
        second.process.kill()
        second.start()
        second.wait()
        wait_until(partial(ready, url, 2), daemon, READY_S, "have both replicas ready")
        after = second.paths()
        assert after.keys() == before.keys() == set(names)
        assert not any(path.exists() for path in before.values()), "files of the dead are left"
        for name in names:
            assert greedy(first.url, name) == greedy(second.url, name)
        assert len({greedy(first.url, name) for name in names}) == len(names)
        for name in names:
            call(url, UNLOAD, {"lora_name": name})
    assert adapters_of(first.url)  # retired names outlive the daemon; the next run cleans them


def ready(url: str, count: int) -> bool:
    found = httpx.get(f"{url}/proxy/status", timeout=10, trust_env=False).json()["replicas"]
    return [replica["state"] for replica in found] == ["ready"] * count


def greedy(url: str, model: str) -> str:
    body = {"model": model, "prompt": list(range(20, 60)), "max_tokens": 16, "temperature": 0}
    answer = call(url, COMPLETIONS, body | {"ignore_eos": True, "return_token_ids": True})
    return str(answer["choices"][0]["token_ids"])

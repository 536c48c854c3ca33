"""The main job, with replicas that die, a daemon that is killed, and a mount that lags."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import START_S, RealParts, replica_running
from tests.e2e.lagging_mount import lagging_mount, missing_for_mounts, seen_at
from tests.e2e.main_job import (
    COMPLETIONS,
    JOB_S,
    LOAD,
    POLICY,
    UNLOAD,
    Run,
    adapters_of,
    check_weights,
    job_running,
    judge_answers,
    keep_published,
    recipe,
)
from tests.e2e.processes import Process, free_port, running, wait_for_health, wait_until
from tests.e2e.tap import Exchange, tapped

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]
LAG_S, NEGATIVE_TTL_S = 2.5, 1.0


class Replica:
    """A vLLM server of this module's own, that can be killed and started again on its port.

    It sees `folder` through a mount that lags, where the machine can mount.
    """

    def __init__(self, parts: RealParts, logs: Path, folder: Path, mount: Path | None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self._parts = parts
        self._logs = logs
        self._before = seen_at(mount, folder) if mount else []
        self._life = ExitStack()
        self._lives = 0
        self._process: Process | None = None

    def start(self) -> None:
        """Returns when it is ready."""
        self._lives += 1
        log = self._logs / f"{self._lives}.log"
        _, process = self._life.enter_context(
            replica_running(self._parts, log, before=self._before, port=self.port)
        )
        wait_for_health(process, f"{self.url}/health", START_S)
        self._process = process

    def kill(self) -> None:
        """SIGKILL to its whole process tree."""
        assert self._process
        self._process.kill()

    def stop(self) -> None:
        self._life.close()


@pytest.fixture(scope="module")
def replica(real_parts: RealParts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    directory = tmp_path_factory.mktemp("replica")
    folder = directory / "bucket"
    folder.mkdir()
    with ExitStack() as stack:
        mount = None
        if not missing_for_mounts():
            mount = stack.enter_context(lagging_mount(folder, LAG_S, NEGATIVE_TTL_S))
        replica = Replica(real_parts, directory, folder, mount)
        stack.callback(replica.stop)
        replica.start()
        yield replica


def new_run(out: Path) -> Run:
    return Run(daemon_port=free_port(), output_dir=out)


def steps(number: int, parts: RealParts, url: str, out: Path) -> list[str | Path]:
    return recipe(parts, url, out, "--max-steps", str(number))


def is_ok(exchange: Exchange, path: str) -> bool:
    return exchange.path == path and exchange.status == 200


def names(run: Run) -> list[str]:
    return [publication.name for publication in run.publications]


def live(run: Run) -> set[str]:
    """Policies whose load the trainer has been told of, and which it has not unloaded."""
    told = [e for e in list(run.exchanges) if e.status == 200]
    loaded = {e.request["lora_name"] for e in told if e.path == LOAD}
    return loaded - {e.request["lora_name"] for e in told if e.path == UNLOAD}


def all_ready(run: Run) -> bool:
    url = f"http://127.0.0.1:{run.daemon_port}/proxy/status"
    found = httpx.get(url, timeout=10, trust_env=False).json()["replicas"]
    return all(replica["state"] == "ready" for replica in found)


def test_replica_killed_mid_rollout_is_back_in_service_with_every_live_adapter(
    real_parts: RealParts, replicas: tuple[str, str], replica: Replica, tmp_path: Path
) -> None:
    """Killed as it is asked for a rollout of v2; v3 and v4 are published without it. The trainer is
    held in the sync of v4 until it is back, for the job would be over sooner than vLLM starts."""
    run = new_run(tmp_path / "out")
    killed, back = threading.Event(), threading.Event()

    def before_answer(exchange: Exchange) -> None:
        if is_ok(exchange, LOAD):
            run.publications.append(keep_published(exchange, tmp_path))
        if exchange.path == "/resume" and len(run.publications) == 4:
            assert back.wait(JOB_S), "the replica is not back"

    def kill_at_v2(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == COMPLETIONS and body["model"] == "trl-policy-v2" and not killed.is_set():
            replica.kill()
            killed.set()
        return body

    # Of each generation it was asked for after its restart: the model, what it had been loaded
    # with, and what was live, all as it was when the call came in.
    asked: list[tuple[str, set[str], set[str]]] = []

    def note(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == COMPLETIONS:
            held = {e.request["lora_name"] for e in second.exchanges if is_ok(e, LOAD)}
            asked.append((body["model"], held, live(run)))
        return body

    with ExitStack() as taps:
        before = taps.enter_context(ExitStack())
        first = before.enter_context(tapped(replica.url, rewrite=kill_at_v2))
        with job_running(
            real_parts,
            (replicas[0], first.url),
            tmp_path,
            run,
            partial(steps, 12),
            before_answer=before_answer,
        ) as job:
            try:
                wait_until(killed.is_set, job, JOB_S, "reach policy v2")
                # From here connections are refused, as by the port of a process that is gone.
                before.close()
                replica.start()
                port = int(first.url.rpartition(":")[2])
                second = taps.enter_context(tapped(replica.url, rewrite=note, port=port))
                wait_until(partial(all_ready, run), job, JOB_S, "have both replicas ready")
            finally:
                back.set()

    assert run.exit_code == 0, run.output[-4000:]
    assert len(run.logged_steps) == 12
    assert len(run.publications) == 7
    judge_answers(run)
    assert not run.lost, f"the trainer lost connections: {run.lost}"
    assert ("POST", COMPLETIONS) in first.lost, "nothing was in flight on the killed replica"

    assert asked, "it was not asked for anything after its restart"
    model, held, alive = asked[0]
    print(
        f"its first generation is of {model}, while {sorted(alive)} live; it holds {sorted(held)}"
    )
    assert alive
    assert alive <= held, f"asked for {model} when it held {held} of {alive}"
    without = [(model, held) for model, held, _ in asked if model not in held]
    assert not without, f"asked for what it did not hold: {without[:3]}"
    check_weights(run, replicas[0])


def test_daemon_killed_between_control_calls_is_a_pause_in_service(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    """Killed when it has answered the resume of v3 and the trainer has not seen the answer yet.

    Allowed, and nothing else: connections of rollouts that were in flight break without an answer,
    and TRL asks again. No control call is lost, every answer is 200, the job ends well.
    """
    run = new_run(tmp_path / "out")
    killed_s: list[float] = []
    answered_s: list[float] = []

    def before_answer(exchange: Exchange) -> None:
        if is_ok(exchange, LOAD):
            run.publications.append(keep_published(exchange, tmp_path))
        if exchange.path == "/resume" and len(run.publications) == 3:
            os.kill(job.child("serve"), signal.SIGKILL)
            killed_s.append(time.monotonic())
        if exchange.path == COMPLETIONS and killed_s:
            answered_s.append(time.monotonic())

    trainer = partial(steps, 12)
    with job_running(
        real_parts, replicas, tmp_path, run, trainer, before_answer=before_answer
    ) as job:
        pass

    assert run.exit_code == 0, run.output[-4000:]
    assert len(killed_s) == 1
    assert "the daemon died of SIGKILL; restart 1 of 3" in run.output
    assert len(run.logged_steps) == 12
    assert names(run) == [f"trl-policy-v{n}" for n in range(1, 8)]
    judge_answers(run)
    print(f"lost with the daemon: {len(run.lost)}; next answer {answered_s[0] - killed_s[0]:.1f} s")
    assert set(run.lost) <= {("POST", COMPLETIONS)}
    check_weights(run, replicas[0])


def test_daemon_killed_inside_a_load_ends_the_job_and_leaves_the_fleet_clean(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    """TRL does not repeat a load. With real pauses (`eager`), which nobody else would end: killed
    when one replica has taken v3 and the daemon has not heard of it."""
    run = new_run(tmp_path / "out")
    killed = threading.Event()

    def before_answer(exchange: Exchange) -> None:
        if is_ok(exchange, LOAD):
            run.publications.append(keep_published(exchange, tmp_path))

    def kill_in_load(exchange: Exchange) -> None:
        if is_ok(exchange, LOAD) and exchange.request["lora_name"] == "trl-policy-v3":
            if not killed.is_set():
                assert is_paused(replicas[0])
                os.kill(job.child("serve"), signal.SIGKILL)
            killed.set()

    with ExitStack() as stack:
        tap = stack.enter_context(tapped(replicas[1], before_answer=kill_in_load))
        job = stack.enter_context(
            job_running(
                real_parts,
                (replicas[0], tap.url),
                tmp_path,
                run,
                before_answer=before_answer,
                options=("--pause", "eager"),
            )
        )
    assert not tap.faults
    assert killed.is_set()
    assert run.exit_code == 1
    assert "the daemon died of SIGKILL; restart 1 of 3" in run.output
    assert "the trainer exited with code 1" in run.output
    assert ("POST", LOAD) in run.lost
    assert names(run) == ["trl-policy-v1", "trl-policy-v2"]
    assert not [url for url in replicas if is_paused(url)], run.output[-4000:]

    # What it published is there to be looked at until the next run begins.
    command = [
        *(sys.executable, "-m", "proxy", "run", "--port", str(free_port())),
        *(part for url in replicas for part in ("--replica", url)),
        *("--", "true"),
    ]
    log = tmp_path / "next.log"
    with running("rollmux run", command, real_parts.child_environment(), log) as process:
        assert process.wait(JOB_S) == 0, process.tail()
    left = [name for url in replicas for name in adapters_of(url) if POLICY.fullmatch(name)]
    assert not left, process.tail()


def is_paused(url: str) -> bool:
    answer = httpx.get(f"{url}/is_paused", timeout=10, trust_env=False)
    return bool(answer.json()["is_paused"])


@pytest.mark.skipif(bool(missing_for_mounts()), reason=missing_for_mounts())
def test_every_publication_commits_behind_a_mount_that_lags(
    real_parts: RealParts, replicas: tuple[str, str], replica: Replica, tmp_path: Path
) -> None:
    """One replica sees the trainer's folder as it is, the other through the mount."""
    run = new_run(replica.folder / "out")

    def before_answer(exchange: Exchange) -> None:
        if is_ok(exchange, LOAD):
            run.publications.append(keep_published(exchange, tmp_path))

    urls = replicas[0], replica.url
    with job_running(
        real_parts, urls, tmp_path, run, partial(steps, 8), before_answer=before_answer
    ):
        pass
    assert run.exit_code == 0, run.output[-4000:]
    judge_answers(run)
    assert names(run) == [f"trl-policy-v{n}" for n in range(1, 6)]
    published_s = [
        float(s) for s in re.findall(r"trl-policy-v\d+ published in (\S+) s", run.output)
    ]
    print(f"published in {published_s} s")
    assert len(published_s) == 5
    assert min(published_s) >= LAG_S - 0.1, "the mount did not lag"
    served = {rollout.headers["x-rollmux-replica"] for rollout in run.rollouts}
    assert len(served) == 2, f"one replica served nothing: {served}"
    check_weights(run, replicas[0])

"""The trainer's Job from within: runs ``rollmux run``, replaces lost replicas, ends them all."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final

from deploy.hf_jobs.hub import Hub, HubError, Interrupted, Say, Stop
from deploy.hf_jobs.plan import ALIAS, PLAN, PORT, REPLICA, Plan
from deploy.hf_jobs.up import WATCHING

DAEMON: Final = (sys.executable, "-P", "-m", "proxy", "run")
"""``-P``: a folder called ``proxy`` where COMMAND runs is not our package."""
PASSED_ON: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
MISSED_LOOKS: Final = 2
"""So often in a row a replica has to be missing from the Hub's list before it is replaced."""
JOIN_S: Final = 40.0
"""A call to the Hub that is under way ends sooner."""
NAMES_S: Final = 1.0
"""Between two looks at the name of a network group."""


def serve_options(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """What ``rollmux run`` is started with here, before COMMAND."""
    if plan.network_group is None:
        words = ["--replicas-hf-label", f"{plan.namespace}/run={plan.run}"]
    else:
        words = ["--replicas-dns", f"{_name(environ)}:{PORT}"]
    if endpoint := environ.get("HF_ENDPOINT"):
        words += ["--hub-endpoint", endpoint]
    words += ["--bucket-gate", f"{plan.bucket}={plan.mount}"]
    words += ["--start-timeout-s", str(plan.start_timeout_s)]
    if plan.flush_path:
        words += ["--flush-path", plan.flush_path]
    return [*words, *plan.run_args]


def run_trainer(
    plan: Plan,
    command: Sequence[str],
    hub: Hub,
    watch_hub: Hub,
    watch_stop: Stop,
    environ: Mapping[str, str],
    say: Say,
) -> int:
    """Run COMMAND under ``rollmux run``; its exit code. The replicas end with it, however it ends.

    ``watch_hub`` and ``watch_stop`` belong to the thread that replaces lost replicas.
    """
    print(WATCHING, flush=True)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.returncode is None:
            child.send_signal(number)

    for name in PASSED_ON:
        signal.signal(signal.Signals[name], pass_on)
    watch = threading.Thread(
        target=_replace_lost, args=(plan, watch_hub, environ, watch_stop, say), daemon=True
    )
    try:
        if plan.network_group is not None:
            _until_all_names(plan, environ, early, say)
        env = {name: value for name, value in environ.items() if name != PLAN}
        if early:
            return 128 + early[0]
        child = subprocess.Popen(
            [*DAEMON, *serve_options(plan, environ), "--", *command],
            env=env,
        )
        for number in early:  # they came while it was started
            child.send_signal(number)
        watch.start()
        code = child.wait()
        return 128 - code if code < 0 else code
    finally:
        watch_stop.set(signal.SIGTERM)
        if watch.ident is not None:
            watch.join(JOIN_S)
        _end_replicas(plan, hub, say, unsure=watch_hub.unsure)


def _end_replicas(plan: Plan, hub: Hub, say: Say, *, unsure: bool) -> None:
    if plan.keep_replicas:
        say(f"the replicas go on; `rollmux deploy hf down --run {plan.run}` ends them")
        return
    hub.unsure = unsure
    try:
        count = hub.cancel_all(plan.labels | {"role": REPLICA}, plan.poll_s)
        say(f"{count} replicas ended")
    except HubError as error:
        say(f"NOT every replica is ended: {error}; they bill until their own timeout")


def _replace_lost(plan: Plan, hub: Hub, secrets: Mapping[str, str], stop: Stop, say: Say) -> None:
    """Until stopped: a Job in the place of each replica that has none. It joins by itself."""
    missed = dict.fromkeys(range(plan.replicas), 0)
    left = plan.max_replacements
    told = ""
    while True:
        try:
            stop.sleep(plan.poll_s)
            live = hub.jobs(plan.labels | {"role": REPLICA}, live=True)
            indices = {(job.labels or {}).get("replica") for job in live}
            for index in missed:
                missed[index] = 0 if str(index) in indices else missed[index] + 1
                if missed[index] < MISSED_LOOKS:
                    continue
                if left == 0:
                    raise HubError(f"replica {index} is lost, and --max-replacements is used up")
                job = hub.start(plan.replica(index), secrets)
                left -= 1
                missed[index] = 0
                say(f"replica {index} was lost; {job.id} takes its place")
        except Interrupted:
            return
        except HubError as error:
            if str(error) != told:
                told = str(error)
                say(f"{told}; the run goes on with the replicas it has")


def _name(environ: Mapping[str, str]) -> str:
    """What every replica of the network group answers to (huggingface_hub 2.4.0, run_job)."""
    return f"{environ.get('HF_NETWORK_GROUP_PREFIX', '')}{ALIAS}"


def _until_all_names(
    plan: Plan, environ: Mapping[str, str], early: Sequence[int], say: Say
) -> None:
    """All replicas have an address, or the time is over: the daemon waits for those it sees."""
    end_s = time.monotonic() + plan.start_timeout_s
    told = -1
    while time.monotonic() < end_s and not early:
        found = len(_addresses(_name(environ)))
        if found >= plan.replicas:
            return
        if found != told:
            told = found
            say(f"{_name(environ)} resolves to {found} of {plan.replicas} replicas")
        time.sleep(NAMES_S)


def _addresses(name: str) -> set[str]:
    try:
        found = socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(info[4][0]) for info in found}

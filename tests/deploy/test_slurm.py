"""deploy/slurm/rollmux.sbatch, run by the real shell among stand-ins for Slurm's and vLLM's tools.

The stand-ins do what the script relies on: `srun` runs its command on this machine, tells it the
node, and kills it when told to end, as the real one does; `vllm` is a simulated replica or a note
of how it was called.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adapter import write_adapter
from deploy.hf_jobs import plan
from tests.deploy.launch import needs_of_a_replica, options_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "rollmux.sbatch"
LIMIT_S = 100.0
"""For anything to happen on a busy machine."""
pytestmark = pytest.mark.timeout(180)

SRUN = """#!/bin/bash
# Like srun: options first, one task; at SIGTERM the task is killed, not told.
out=/dev/stdout
while [[ $1 == --* ]]; do
  case $1 in
    --nodelist=*) FAKE_HOST=${1#*=} ;;
    --output=*) out=${1#*=} ;;
  esac
  echo "$1" >>"$FAKE/options"
  shift
done
export FAKE_HOST SLURM_NODEID=0
"$@" >>"$out" 2>&1 &
task=$!
trap 'kill -KILL $task 2>/dev/null; wait; exit 137' TERM
wait $task
exit $?
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && tr , '\\n' <<<"$3"
"""
VLLM = """#!{python}
import json, os, sys, tempfile
note = {{"pid": os.getpid(), "argv": sys.argv[1:], "host": os.environ["FAKE_HOST"]}}
ours = ("VLLM", "ROLLMUX", "PYTHONPATH")
note["environ"] = {{k: v for k, v in os.environ.items() if k.startswith(ours)}}
with tempfile.NamedTemporaryFile("w", dir=os.environ["FAKE"], delete=False) as half:
    json.dump(note, half)
os.rename(half.name, os.path.join(os.environ["FAKE"], f"vllm-{{os.getpid()}}.json"))
port = sys.argv[sys.argv.index("--port") + 1]
os.environ["PYTHONPATH"] = {root!r}
serve = [sys.executable, "-m", "benchmarks.replica", "--host", note["host"], "--port", port]
serve += ["--push-key", os.environ["ROLLMUX_PUSH_KEY"], "--push-root", os.environ["FAKE"] + "/push"]
wait = [sys.executable, "-c", "import signal; signal.pause()"]
os.execv(sys.executable, serve if os.environ.get("FAKE_SERVE") else wait)
"""
ROLLMUX = """#!/bin/bash
# Instead of the real one: notes its arguments, then is the trainer.
printf '%s\\n' "$@" >"$FAKE/rollmux-args"
while [[ $1 != -- ]]; do shift; done
shift
exec "$@"
"""
REAL_ROLLMUX = """#!/bin/bash
export PYTHONPATH={root}
exec {python} -P -m proxy "$@"
"""


@dataclass
class Cluster:
    """A folder of stand-ins, and the environment that sbatch would give."""

    folder: Path
    environ: dict[str, str]
    batches: list[Batch] = field(default_factory=list)

    def tool(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def submit(self, *command: str, nodes: str = "127.0.0.1,127.0.0.2", **environ: str) -> Batch:
        log = self.folder / "log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                ["bash", str(SCRIPT), *command],
                env=self.environ | {"SLURM_JOB_NODELIST": nodes} | environ,
                cwd=self.folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.batches.append(Batch(self, child, log))
        return self.batches[-1]

    def vllms(self) -> list[dict[str, Any]]:
        """How each `vllm` was called so far."""
        return [json.loads(p.read_text()) for p in sorted(self.folder.glob("vllm-*.json"))]


@dataclass
class Batch:
    """The batch script while it runs."""

    cluster: Cluster
    child: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        try:
            return self.child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()) from None

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert self.child.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    names = {"python": sys.executable, "root": str(ROOT)}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLMUX_", "SLURM_"))}
    made = Cluster(
        tmp_path,
        clean
        | {
            "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "FAKE": str(tmp_path),
            "SLURM_JOB_ID": str(os.getpid()),  # its ports are no other test's
            "SLURM_SUBMIT_DIR": str(ROOT),
            "LOGS": str(tmp_path / "logs"),
            "TMPDIR": str(tmp_path / "tmp"),
            "MODEL": "tiny",
        },
    )
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        made.tool(name, text)
    made.tool("vllm", VLLM.format(**names))
    made.tool("rollmux", ROLLMUX)
    yield made
    for batch in made.batches:  # nothing is left of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(batch.child.pid, signal.SIGKILL)
        batch.child.wait()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def value_of(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_shellcheck_is_silent():
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


TRAINER = """
import json, os, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(os.environ["ROLLMUX_URL"] + path, data, headers)
    return opener.open(asked, timeout=60).read()
call("/v1/load_lora_adapter", {"lora_name": "trl-policy-v1", "lora_path": sys.argv[1]})
rollout = {"model": "trl-policy-v1", "prompt": [5, 6], "max_tokens": 3}
reply = json.loads(call("/v1/completions", rollout))
status = json.loads(call("/proxy/status"))
with open(sys.argv[2], "w") as out:
    metrics = call("/metrics").decode()
    json.dump({"replicas": status["replicas"], "reply": reply, "metrics": metrics}, out)
sys.exit(7)
"""


def test_a_run_trains_on_the_replicas_of_the_other_nodes_and_ends_with_the_trainers_code(
    cluster, tmp_path
):
    """Real rollmux, simulated replicas; the adapter's folder is one that no replica is told of."""
    cluster.tool("rollmux", REAL_ROLLMUX.format(python=sys.executable, root=ROOT))
    adapter = write_adapter(tmp_path / "trainers own" / "v1", 1, rank=1, layers=1)
    result = tmp_path / "result"
    batch = cluster.submit(
        *(sys.executable, "-c", TRAINER, str(adapter), str(result)),
        nodes="127.0.0.1,127.0.0.2,127.0.0.3",
        FAKE_SERVE="1",
        ROLLMUX_PORT=str(free_port()),
    )
    assert batch.wait() == 7, batch.text()
    found = json.loads(result.read_text())
    port = 20_000 + os.getpid() % 10_000
    assert {r["url"] for r in found["replicas"]} == {f"http://127.0.0.{n}:{port}" for n in (2, 3)}
    assert all(r["adapters"] == ["trl-policy-v1"] for r in found["replicas"])
    assert found["reply"]["choices"]
    pushed = re.findall(r"^rollmux_pushed_bytes_total\S* (\S+)", found["metrics"], re.MULTILINE)
    assert sum(map(float, pushed)) > 0
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not any(is_alive(vllm["pid"]) for vllm in cluster.vllms())


def started(cluster: Cluster, count: int, **environ: str) -> tuple[Batch, list[dict[str, Any]]]:
    """A batch whose trainer only waits, once ``count`` replicas have been started."""
    batch = cluster.submit(sys.executable, "-c", "import signal; signal.pause()", **environ)
    batch.until(lambda: len(cluster.vllms()) >= count)
    return batch, cluster.vllms()


def test_options_and_environment_of_a_replica_are_those_of_the_hugging_face_jobs(cluster):
    """One list of what a run needs, wherever it runs."""
    batch, (vllm,) = started(cluster, 1, MAX_STALENESS="3", VLLM_ARGS="--dtype bfloat16")
    argv, environ = vllm["argv"], vllm["environ"]
    assert argv[:2] == ["serve", "tiny"]
    assert (value_of(argv, "--max-loras"), value_of(argv, "--max-cpu-loras")) == ("5", "20")
    assert value_of(argv, "--dtype") == "bfloat16"
    assert value_of(argv, "--middleware") == "rollmux_push.AdapterPush"
    assert Path(environ["PYTHONPATH"].split(":")[0], "rollmux_push.py").is_file()
    assert len(environ["ROLLMUX_PUSH_KEY"]) == 32
    options, needed = needs_of_a_replica(max_staleness=3, max_lora_rank=32, max_model_len=8192)
    assert options - {f"--port={plan.PORT}"} <= options_of(argv)
    assert needed.items() <= environ.items()
    batch.child.terminate()
    batch.wait()


def test_every_replica_of_a_node_has_its_port_and_its_gpus_and_rollmux_knows_it(cluster):
    batch, vllms = started(cluster, 2, REPLICAS_PER_NODE="2", GPUS_PER_REPLICA="4")
    batch.until(lambda: (cluster.folder / "rollmux-args").exists())
    first = 20_000 + os.getpid() % 10_000
    ports = {value_of(vllm["argv"], "--port") for vllm in vllms}
    assert ports == {str(first), str(first + 1)}
    assert {value_of(vllm["argv"], "--tensor-parallel-size") for vllm in vllms} == {"4"}
    assert (cluster.folder / "options").read_text().splitlines().count("--gpus-per-task=4") == 2
    args = (cluster.folder / "rollmux-args").read_text().splitlines()
    assert args[:6] == [
        "run",
        *("--replica", f"http://127.0.0.2:{first}"),
        *("--replica", f"http://127.0.0.2:{first + 1}"),
        "--",
    ]
    batch.child.terminate()
    batch.wait()


@pytest.mark.parametrize(
    ("nodes", "per_node", "of_a_replica", "of_the_trainer"),
    [("127.0.0.1,127.0.0.2", "2", 8, 16), ("127.0.0.1", "2", 4, 4), ("127.0.0.1", "16", 1, 1)],
)
def test_steps_share_a_nodes_cpus_and_none_takes_all_its_memory(
    cluster, nodes, per_node, of_a_replica, of_the_trainer
):
    """One CPU is what a step gets that does not ask; the memory it takes keeps the next waiting."""
    count = int(per_node)
    environ = {"REPLICAS_PER_NODE": per_node, "SLURM_CPUS_ON_NODE": "16"}
    batch, _ = started(cluster, count, nodes=nodes, **environ)
    batch.until(lambda: (cluster.folder / "rollmux-args").exists())
    asked = Counter((cluster.folder / "options").read_text().split())
    assert asked["--mem=0"] == count + 1
    wanted = Counter({f"--cpus-per-task={of_a_replica}": count})
    wanted[f"--cpus-per-task={of_the_trainer}"] += 1
    assert {k: n for k, n in asked.items() if k.startswith("--cpus")} == wanted
    batch.child.terminate()
    batch.wait()


def test_on_one_node_replica_and_trainer_share_it(cluster):
    batch, (vllm,) = started(cluster, 1, nodes="127.0.0.1")
    assert vllm["host"] == "127.0.0.1"
    batch.child.terminate()
    batch.wait()


def test_replica_that_ends_is_started_again_on_its_port(cluster):
    batch, (first,) = started(cluster, 1, RESTART_REPLICA_S="0")
    os.kill(first["pid"], signal.SIGKILL)
    batch.until(lambda: len(cluster.vllms()) == 2)
    (second,) = (v for v in cluster.vllms() if v["pid"] != first["pid"])
    assert value_of(second["argv"], "--port") == value_of(first["argv"], "--port")
    batch.child.terminate()
    batch.wait()
    assert not any(is_alive(vllm["pid"]) for vllm in cluster.vllms())


def test_sigterm_reaches_the_trainer_which_may_save_before_all_ends(cluster, tmp_path):
    """`srun` would kill the trainer, and `scancel` would end the daemon too: the script tells
    `rollmux run` alone, and waits."""
    saving = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    pathlib.Path(sys.argv[1], 'saved').touch()\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path(sys.argv[1], 'training').touch()\n"
        "while True: signal.pause()\n"
    )
    batch = cluster.submit(sys.executable, "-c", saving, str(tmp_path))
    batch.until(lambda: (tmp_path / "training").exists() and bool(cluster.vllms()))
    batch.child.terminate()
    assert batch.wait() == 5, batch.text()
    assert (tmp_path / "saved").exists()
    assert not any(is_alive(vllm["pid"]) for vllm in cluster.vllms())


@pytest.mark.parametrize(
    ("command", "environ", "names"),
    [
        ([], {}, "trainer command"),
        (["true"], {"MODEL": ""}, "MODEL"),
        (["true"], {"PUSH_FOLDER": "/nowhere"}, "PUSH_FOLDER"),
        (["true"], {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(cluster, command, environ, names):
    batch = cluster.submit(*command, **environ)
    assert batch.wait() in (1, 2)
    assert names in batch.text()
    assert cluster.vllms() == []

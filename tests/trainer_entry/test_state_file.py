"""A real ``rollmux run`` whose daemon is killed: the next one knows what no replica can tell."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks.adapter import write_adapter
from benchmarks.replica import SimulatedReplica

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 60.0

TRAINER = """
import json, os, signal, sys, time, urllib.request
url, folder = os.environ["ROLLMUX_URL"], sys.argv[1]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def post(path, **body):
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    opener.open(urllib.request.Request(url + path, data, headers), timeout=30).read()
def policy():
    return json.load(opener.open(url + "/proxy/status", timeout=30))["policy"]
def daemon():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat[1]) == os.getppid() and int(pid) != os.getpid():
            return int(pid)
for name in ("trl-policy-v1", "trl-policy-v2"):
    post("/v1/load_lora_adapter", lora_name=name, lora_path=f"{folder}/{name}")
post("/v1/unload_lora_adapter", lora_name="trl-policy-v1")
assert policy()["retired"] == ["trl-policy-v1"], policy()
os.kill(daemon(), signal.SIGKILL)
by = time.monotonic() + 45
while time.monotonic() < by:
    try:
        after = policy()
    except OSError:  # the killed one's last connections
        continue
    if after["live"]:
        break
    time.sleep(0.05)
print("after:", after["live"], after["retired"], flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the trainer looks into /proc")
async def test_a_retired_name_is_still_retired_after_the_daemon_was_killed(tmp_path: Path) -> None:
    """Without a state file it would be taken for a live one: the replica still lists it."""
    for version in (1, 2):
        write_adapter(tmp_path / f"trl-policy-v{version}", str(version), hidden=16, layers=1)
    (tmp_path / "train.py").write_text(TRAINER)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLMUX_", "PROXY_"))}
    async with SimulatedReplica() as replica:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "run", "--port", "0", "--replica", replica.url),
            *("--", sys.executable, str(tmp_path / "train.py"), str(tmp_path)),
            cwd=ROOT,
            env={**environ, "TMPDIR": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    assert process.returncode == 0, output
    assert "after: ['trl-policy-v2'] ['trl-policy-v1']" in output, output
    assert [name for name in os.listdir(tmp_path) if name.startswith("rollmux-run-")] == []

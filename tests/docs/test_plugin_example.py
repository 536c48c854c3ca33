"""The worked example of docs/plugins.md, loaded as a user would load it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.daemon import connect, daemon
from benchmarks.replica import SimulatedReplica

ROOT = Path(__file__).parents[2]
STICKY = ROOT / "docs/examples/sticky"


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A folder in which the example lies as an installer leaves it: module and metadata."""
    project = tomllib.loads((STICKY / "pyproject.toml").read_text("utf-8"))["project"]
    module = STICKY / "rollmux_sticky.py"
    (tmp_path / module.name).write_bytes(module.read_bytes())
    info = tmp_path / f"rollmux_sticky-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(tmp_path)


def rollmux(path: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "proxy", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_keeps_the_contract_at_its_import_path() -> None:
    said = rollmux(str(STICKY), "routers", "--check", "rollmux_sticky:create")
    assert said == "rollmux_sticky:create: keeps the contract of routing.router.Router\n"


def test_its_entry_point_gives_it_a_name(installed: str) -> None:
    rows = [line.split() for line in rollmux(installed, "routers").splitlines()]
    assert ["sticky", "rollmux_sticky:create", "rollmux-sticky", "1.0"] in rows
    assert "keeps the contract" in rollmux(installed, "routers", "--check", "sticky")


async def test_a_daemon_routes_by_it(installed: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", installed)
    async with SimulatedReplica() as a, SimulatedReplica() as b:
        fleet = [a.url, b.url]
        async with (
            daemon(fleet, tmp_path / "log", ["--router", "sticky"]) as url,
            connect(url) as client,
        ):
            answers = [
                await client.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": [prompt] * 9, "max_tokens": 1},
                )
                for prompt in (1, 2, 1, 2)
            ]
    assert [a.headers["x-rollmux-route"] for a in answers] == ["fresh", "fresh", "sticky", "sticky"]
    replicas = [a.headers["x-rollmux-replica"] for a in answers]
    assert replicas[:2] == replicas[2:]
    assert replicas[0] != replicas[1]

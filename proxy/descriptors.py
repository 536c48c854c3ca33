"""File descriptors: how many this process may have, and how many generations that is."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource

log = logging.getLogger("rollmux")

WANTED = 65_536
ENOUGH = 4096
"""Fewer are told of at the start: 1,984 generations."""
RESERVED = 64
"""Kept free of generations, at least, as is a sixteenth of all: probes, control calls and their
answers, `/metrics`, clients about to be refused, files."""

USED_UP = frozenset((errno.EMFILE, errno.ENFILE))
"""Why a connect fails that never left this machine."""


def raise_to(wanted: int) -> None:
    """As many as ``wanted``, if we may have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raise_limit() -> None:
    """As many as we may have, and a warning where they are few."""
    raise_to(WANTED)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH:
        log.warning(
            "only %d file descriptors: at most %d generations at once, others are answered 503; "
            "raise `ulimit -n`",
            soft,
            most_generations(),
        )


def most_generations() -> int:
    """Each takes two: its client's connection and its replica's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = WANTED
    return max(1, (soft - max(RESERVED, soft // 16)) // 2)

"""This node's rank in a multi-node job, and where the leader's daemon is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RANK_NAMES: Final = ("MACHINE_RANK", "NODE_RANK", "SLURM_NODEID")
"""Accelerate's, torchrun's and Slurm's name; the first one set wins (contract 3.4)."""
ADDRESS_NAMES: Final = ("MASTER_ADDR", "MAIN_PROCESS_IP")
"""Where torchrun's and accelerate's rank 0 is; the daemon runs beside it."""
WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses one can listen on but should not connect to."""


class RankError(ValueError):
    """The operator's to mend: one line that names the variable and the fix. Exit code 2."""


def node_rank(env: Mapping[str, str]) -> int:
    """The rank of this node, 0 where nothing is set. ``RankError`` if it is not a number."""
    for name in RANK_NAMES:
        if name in env:
            text = env[name].strip()
            if not (text.isascii() and text.isdigit()):
                raise RankError(
                    f"{name}={env[name]!r} is not a node's rank; "
                    "set it to 0, 1, 2, … or unset it (a job of one node)"
                )
            return int(text)
    return 0


def leader_url(env: Mapping[str, str], host: str, port: int) -> str:
    """Where a node that does not lead finds the daemon.

    ``ROLLMUX_URL`` if set, else the leader's address of the launcher, else ``host``.
    """
    if url := env.get("ROLLMUX_URL", "").strip():
        return url.rstrip("/")
    for name in ADDRESS_NAMES:
        if address := env.get(name, "").strip():
            return base_url(address, port)
    return base_url(host, port)


def base_url(host: str, port: int) -> str:
    """``http://host:port`` to connect to, for a host to listen on."""
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

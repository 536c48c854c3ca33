"""What every way to start a run has to agree on, for the tests of scripts and manifests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.hf_jobs import plan

ROOT = Path(__file__).resolve().parents[2]


def needs_of_a_replica(
    *, max_staleness: int, max_lora_rank: int, max_model_len: int
) -> tuple[set[str], dict[str, str]]:
    """Options (``--name=value`` or a bare ``--name``) and environment of a vLLM server.

    They are those of the Hugging Face Jobs: one list of what a run needs, wherever it runs.
    """
    job = plan.Plan(
        run="r",
        launch="0" * 12,
        namespace="me",
        model="tiny",
        bucket="me/b",
        max_staleness=max_staleness,
        max_lora_rank=max_lora_rank,
        max_model_len=max_model_len,
        push_module="x",
    ).replica(0)
    words = job.command[-1].rpartition("exec ")[2].split()
    return options_of(words), {k: v for k, v in job.env.items() if k != "PUSH_MODULE"}


def options_of(words: Sequence[str]) -> set[str]:
    """The options of a command line, each as ``--name=value`` or a bare ``--name``."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {
        word if value.startswith("--") else f"{word}={value}"
        for word, value in pairs
        if word.startswith("--")
    }


def daemon_accepts(args: Sequence[str], **environ: str) -> bool:
    """Whether the daemon takes this command line; it is stopped by a socket that is not there."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLMUX_", "PROXY_"))}
    done = subprocess.run(
        [sys.executable, "-m", "proxy", *args, "--fd", "999999"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean | environ,
        timeout=60,
    )
    return "--fd: 999999 is not a socket" in done.stderr

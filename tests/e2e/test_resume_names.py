"""A trainer that resumes from an older checkpoint: its names and paths are used again, with other
weights. What a name says afterwards has to be what the same files say under a fresh name."""

from __future__ import annotations

import random
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adapter import write_adapter
from tests.e2e.conftest import RealParts
from tests.e2e.main_job import (
    COMPLETIONS,
    LOAD,
    SAME_WEIGHTS,
    UNLOAD,
    call,
    check_weights,
    recipe,
    run_job,
)
from tests.e2e.processes import environment_with, free_port, running, wait_for_health

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]
# Longer than two blocks: asked again under the same name, it is found in the prefix cache.
PROMPT = [random.Random(7).randrange(10, 300) for _ in range(50)]
REPLY = 24

Reply = tuple[list[int], list[float]]
"""Greedy tokens and their log-probabilities."""


def reply_of(url: str, model: str) -> Reply:
    body = {"model": model, "prompt": PROMPT, "max_tokens": REPLY, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    choice = call(url, COMPLETIONS, body | more)["choices"][0]
    assert len(choice["token_ids"]) == REPLY
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def fresh_reply(url: str, name: str, files: Path) -> Reply:
    """What `files` say under a name that nobody has used."""
    call(url, LOAD, {"lora_name": name, "lora_path": str(files)})
    reply = reply_of(url, name)
    call(url, UNLOAD, {"lora_name": name})
    return reply


def differ(one: Reply, other: Reply) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] != other[0] or max(abs(a - b) for a, b in pairs) > SAME_WEIGHTS


def shorter(parts: RealParts, url: str, out: Path) -> list[str | Path]:
    """Eight steps: v4 and a checkpoint after the sixth, v5 after the last."""
    return recipe(parts, url, out, "--max-steps", "8")


def test_run_resumed_from_an_older_checkpoint_serves_its_own_weights(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    """The first run's v5 is of step 8. The second goes on from step 6 and calls that v5."""
    out = tmp_path / "out"
    job = partial(run_job, real_parts, replicas)
    first = job(made(tmp_path / "first"), shorter, out=out)
    assert first.exit_code == 0, first.output[-4000:]
    old = {url: reply_of(url, "trl-policy-v5") for url in replicas}
    for checkpoint in out.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-6":
            shutil.rmtree(checkpoint)

    second = job(made(tmp_path / "second"), shorter, out=out)
    assert second.exit_code == 0, second.output[-4000:]
    assert f"resuming from {out / 'checkpoint-6'}" in second.output
    published = {publication.name: publication.files for publication in second.publications}
    assert list(published) == ["trl-policy-v5", "trl-policy-v6"]
    for url in replicas:
        new = reply_of(url, "trl-policy-v5")
        fresh = fresh_reply(url, f"fresh-{second.daemon_port}", published["trl-policy-v5"])
        assert differ(old[url], fresh), "the two v5 cannot be told apart"
        assert not differ(new, fresh), f"{url}: v5 says {new}, its files say {fresh}"
    check_weights(second, replicas[0])


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize("own_copies", ["auto", "never"])
def test_daemon_left_running_takes_names_over_from_an_earlier_trainer(
    own_copies: str, real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    """With `never`, the replicas are given the very path again."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        *(sys.executable, "-m", "proxy", "serve", "--port", str(port)),
        *("--own-copies", own_copies),
        *(part for replica in replicas for part in ("--replica", replica)),
    ]
    log = tmp_path / "daemon.log"
    with running("rollmux serve", command, environment_with(), log) as process:
        wait_for_health(process, f"{url}/health", 60)
        # `never` and `auto` use the same replicas, not the same names.
        names = [f"resumed-{own_copies}-v{number}" for number in (1, 2)]
        old = publish(url, names, tmp_path, "first")
        before = {(r, name): reply_of(r, name) for r in replicas for name in names}
        new = publish(url, names, tmp_path, "second")
        for (replica, name), said in before.items():
            assert not differ(said, fresh_reply(replica, f"old-{name}", old[name]))
            fresh = fresh_reply(replica, f"new-{name}", new[name])
            assert differ(said, fresh), "the adapters cannot be told apart"
            again = reply_of(replica, name)
            assert not differ(again, fresh), f"{replica}: {name} says {again}, not {fresh}"
            assert not differ(reply_of(url, name), fresh)
        for replica in replicas:
            for name in names:
                call(replica, UNLOAD, {"lora_name": name})


def publish(url: str, names: list[str], directory: Path, seed: str) -> dict[str, Path]:
    """As TRL does it, at the paths of whoever did it before; returns copies of the files."""
    copies: dict[str, Any] = {}
    for name in names:
        files = directory / ".vllm_lora" / name
        shutil.rmtree(files, ignore_errors=True)
        write_adapter(files, f"{seed} {name}", rank=4, modules=("q_proj", "o_proj"))
        copies[name] = shutil.copytree(files, directory / seed / name)
        call(url, "/pause?mode=keep", {})
        call(url, LOAD, {"lora_name": name, "lora_path": str(files)})
        call(url, "/resume", {})
    return copies

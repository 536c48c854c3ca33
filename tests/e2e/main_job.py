"""The main job on real parts, and what has to be true of it.

`run_job` runs `rollmux run ... -- TRAINER` with a tap between trainer and daemon and keeps what the
checks need. TRAINER is `recipe`, the sanity recipe on an untouched TRL. `judge` makes the checks.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import RealParts
from tests.e2e.processes import ROOT, Process, free_port, running
from tests.e2e.tap import Exchange, Rewrite, tapped

RECIPE = ROOT / "trainer_entry" / "recipes" / "sanity_lora.py"
STAND_INS = ROOT / "tests" / "e2e" / "cpu_stand_ins"
JOB_S = 300.0  # 40 s on two idle cores; 160 s were seen with four other jobs on them
COMPLETIONS = "/v1/completions"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
POLICY = re.compile(r"trl-policy-v(\d+)")


@dataclass(frozen=True, slots=True)
class Publication:
    """One adapter as it was when its load had been answered and the trainer did not know yet."""

    name: str
    files: Path  # a copy: TRL deletes its own
    listed: Mapping[str, frozenset[str]]  # replica URL -> adapters it lists


@dataclass(slots=True)
class Run:
    exit_code: int = -1
    output: str = ""
    daemon_port: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    unseen: list[Exchange] = field(default_factory=list)  # answered when the trainer was gone
    lost: list[tuple[str, str]] = field(default_factory=list)  # calls whose connection broke
    publications: list[Publication] = field(default_factory=list)
    daemon_metrics: str = ""  # at the last publication
    preemptions: dict[str, float] = field(default_factory=dict)  # replica URL -> during the run
    output_dir: Path = Path()

    @property
    def rollouts(self) -> list[Exchange]:
        return [e for e in self.exchanges if e.path == COMPLETIONS]

    @property
    def logged_steps(self) -> list[dict[str, Any]]:
        """What TRL logged, one dict per optimizer step."""
        state = json.loads((self.output_dir / "trainer_state.json").read_text())
        return [entry for entry in state["log_history"] if "ratio" in entry]


Trainer = Callable[[RealParts, str, Path], list[str | Path]]
"""From parts, URL and output directory to the trainer's command line."""


def recipe(parts: RealParts, url: str, out: Path, *more: str) -> list[str | Path]:
    return [
        *("env", f"PYTHONPATH={STAND_INS}", "TRL_EXPERIMENTAL_SILENCE=1"),
        *(parts.python, RECIPE, "--preset", "cpu-smoke", "--url", url, "--output-dir", out),
        *("--model", parts.model, "--dataset", parts.problems, *more),
    ]


def run_job(
    parts: RealParts,
    replicas: tuple[str, str],
    directory: Path,
    trainer: Trainer = recipe,
    *,
    port: int | None = None,
    planted: Rewrite | None = None,
    out: Path | None = None,
    options: Sequence[str] = (),
    secrets: Mapping[str, str] | None = None,
) -> Run:
    """Run the job once. `planted` falsifies what the second replica is asked.

    `out` is the trainer's output directory, `directory`/out unless told; `options` and `secrets`
    are the daemon's.
    """
    run = Run(daemon_port=port or free_port(), output_dir=out or directory / "out")
    before = {url: preemptions(url) for url in replicas}

    def note_publication(exchange: Exchange) -> None:
        if exchange.path != LOAD or exchange.status != 200:
            return
        listed = settled_adapters(replicas)
        run.publications.append(keep_published(exchange, directory, listed))
        run.daemon_metrics = httpx.get(
            f"http://127.0.0.1:{run.daemon_port}/metrics", timeout=10, trust_env=False
        ).text

    with ExitStack() as stack:
        second = replicas[1]
        if planted:
            second = stack.enter_context(tapped(second, rewrite=planted)).url
        urls = replicas[0], second
        stack.enter_context(
            job_running(
                parts,
                urls,
                directory,
                run,
                trainer,
                before_answer=note_publication,
                options=options,
                secrets=secrets,
            )
        )
    run.preemptions = {url: preemptions(url) - before[url] for url in replicas}
    return run


@contextmanager
def job_running(
    parts: RealParts,
    replicas: Sequence[str],
    directory: Path,
    run: Run,
    trainer: Trainer = recipe,
    *,
    before_answer: Callable[[Exchange], None],
    options: Sequence[str] = (),
    secrets: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """The job, with a tap before the daemon. Leaving the block waits for its end.

    Fills in `run`: what the trainer saw from the start on, the rest at the end. `options` are those
    of `rollmux serve`, `secrets` are variables of its environment.
    """
    daemon = f"http://127.0.0.1:{run.daemon_port}"
    with tapped(daemon, before_answer=before_answer) as tap:
        run.exchanges, run.unseen, run.lost = tap.exchanges, tap.unseen, tap.lost
        command = [
            *(sys.executable, "-m", "proxy", "run", "--port", str(run.daemon_port), *options),
            *(part for url in replicas for part in ("--replica", url)),
            *("--", *trainer(parts, tap.url, run.output_dir)),
        ]
        log = directory / "job.log"
        environment = parts.child_environment(**(secrets or {}))
        with running("rollmux run", command, environment, log) as job:
            yield job
            run.exit_code = job.wait(JOB_S)
            run.output = log.read_text(errors="replace")
    if tap.faults:
        raise tap.faults[0]


def keep_published(
    exchange: Exchange, directory: Path, listed: Mapping[str, frozenset[str]] | None = None
) -> Publication:
    """Copies what an answered load was about to `directory`/published."""
    name = exchange.request["lora_name"]
    copy = directory / "published" / name
    shutil.copytree(exchange.request["lora_path"], copy, dirs_exist_ok=True)
    return Publication(name, copy, listed or {})


def judge(run: Run, reference: str, *, steps: int, publications: int) -> None:
    """Every check of the main job; an AssertionError naming the first that fails.

    `reference` is a replica's own URL, past anything planted.
    """
    assert run.exit_code == 0, f"exit code {run.exit_code}:\n{run.output[-4000:]}"
    assert len(run.logged_steps) >= steps, f"{len(run.logged_steps)} steps"
    ratios = [entry["ratio"] for entry in run.logged_steps]
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios), f"ratio of every step: {ratios}"
    print(f"ratio of every step: {ratios}")
    assert (run.output_dir / "final-adapter" / "adapter_model.safetensors").stat().st_size
    judge_serving(run, reference, publications=publications)


def judge_serving(run: Run, reference: str, *, publications: int) -> None:
    """Those checks of `judge` that hold for any trainer."""
    assert len(run.publications) >= publications, f"{len(run.publications)} publications"
    judge_answers(run)
    assert not run.lost, f"the trainer lost connections: {run.lost}"
    check_weights(run, reference)
    assert len(share_by(run, "x-rollmux-replica")) == 2, "one replica served nothing"
    for publication in run.publications:
        one, another = publication.listed.values()
        assert one == another, f"at {publication.name} they list {publication.listed}"
        assert publication.name in one, f"{publication.name} is not listed: {one}"
    routes = share_by(run, "x-rollmux-route")
    print(f"{len(run.rollouts)} rollouts: {routes} {share_by(run, 'x-rollmux-replica')}")
    assert routes.get("affinity", 0) >= 0.6, f"routes of {len(run.rollouts)} rollouts: {routes}"
    assert not any(run.preemptions.values()), f"preemptions: {run.preemptions}"


def judge_answers(run: Run) -> None:
    other = [(e.method, e.path, e.status, e.text[:300]) for e in run.exchanges if e.status != 200]
    assert not other, f"the trainer saw answers but 200: {other}"


# Between a token's log-probability as served and recomputed in one pass: rounding in float32 was at
# most 5e-6. One version away from the right one it was 0.008 or more, with the base model 0.5.
SAME_WEIGHTS = 1e-3
CHECKED_PER_VERSION = 12  # rollouts of one version by one replica


def check_weights(run: Run, reference: str) -> None:
    """Rollouts of every version by every replica came from that version's own weights.

    `ratio` cannot show it: it is the mean of p/q over tokens drawn from q: about 1 whatever q is.
    So the log-probabilities that the trainer was given are held against those of the version's own
    files, loaded again under a fresh name. This sees what greedy tokens show, and also the steps
    that are too small to change one.
    """
    worst: dict[tuple[str, str], float] = {}
    for publication in run.publications:
        served: dict[str, list[Exchange]] = defaultdict(list)
        for rollout in run.rollouts:
            if rollout.request["model"] == publication.name:
                served[rollout.headers["x-rollmux-replica"]].append(rollout)
        fresh = f"check-{run.daemon_port}-{publication.name}"
        call(reference, LOAD, {"lora_name": fresh, "lora_path": str(publication.files)})
        for replica, rollouts in served.items():
            worst[publication.name, replica] = max(
                difference(rollout, reference, fresh) for rollout in rollouts[:CHECKED_PER_VERSION]
            )
        call(reference, UNLOAD, {"lora_name": fresh})
    print(f"largest difference of a log-probability: {worst}")
    wrong = {key: value for key, value in worst.items() if value > SAME_WEIGHTS}
    assert not wrong, f"served with other weights than their name says: {wrong}; all: {worst}"


def difference(rollout: Exchange, reference: str, model: str) -> float:
    """Largest difference of a token's log-probability, as served and as `model` has it."""
    choice = rollout.reply["choices"][0]
    served = choice["logprobs"]["token_logprobs"]
    whole = rollout.request["prompt"] + choice["token_ids"]
    answer = call(
        reference,
        COMPLETIONS,
        {"model": model, "prompt": whole, "max_tokens": 1, "prompt_logprobs": 0},
    )
    known = answer["choices"][0]["prompt_logprobs"][-len(served) :]
    pairs = zip(choice["token_ids"], served, known, strict=True)
    return max(abs(value - by_id[str(token)]["logprob"]) for token, value, by_id in pairs)


def share_by(run: Run, header: str) -> dict[str, float]:
    """Share of the rollouts' answers by the value of `header`."""
    counts = Counter(rollout.headers.get(header, "") for rollout in run.rollouts)
    return {value: count / counts.total() for value, count in counts.items()}


def call(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, f"{url}{path}: {answer.status_code} {answer.text}"
    return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text


def adapters_of(url: str) -> frozenset[str]:
    models = httpx.get(f"{url}/v1/models", timeout=10, trust_env=False).json()["data"]
    return frozenset(card["id"] for card in models if card["parent"])


def settled_adapters(urls: tuple[str, str]) -> dict[str, frozenset[str]]:
    """What each lists; seen again for 3 s if they differ: a retired name may be leaving."""
    for _ in range(30):
        listed = {url: adapters_of(url) for url in urls}
        if len(set(listed.values())) == 1:
            break
        time.sleep(0.1)
    return listed


def preemptions(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    found = re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert found, f"{url}/metrics has no vllm:num_preemptions_total"
    return sum(map(float, found))

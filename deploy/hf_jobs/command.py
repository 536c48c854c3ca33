"""``rollmux deploy hf``: its options, and what each of its commands prints."""

from __future__ import annotations

import argparse
import json
import secrets as random_secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deploy.hf_jobs.hub import (
    EXPOSED_USD_HOUR,
    Credentials,
    Hub,
    HubError,
    Interrupted,
    Stop,
    credentials,
    live_price,
    name_of,
    stderr,
)
from deploy.hf_jobs.plan import IMAGE, PLAN, PUSH_KEY, TRAINER, JobSpec, Plan, PlanError
from deploy.hf_jobs.trainer import run_trainer
from deploy.hf_jobs.up import StartError, up, wait
from proxy.settings import SettingsError
from proxy.version import version

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

FINE, FAILURE = 0, 1
TAKES_COMMAND: Final = ("up", "trainer")
PUSH_MODULE: Final = Path(__file__).parents[1] / "replica" / "rollmux_push.py"
DRY_PATIENCE_S: Final = 5.0
"""A dry run shows what it can without the Hub."""
SHOWN: Final = 200
"""Characters of a value that a dry run shows."""
SECOND_SIGNAL_S: Final = 5.0


# --- options ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rollmux deploy``."""
    where = parser.add_subparsers(dest="where", metavar="WHERE", required=True)
    hf = where.add_parser("hf", help="Hugging Face Jobs", allow_abbrev=False)
    commands = hf.add_subparsers(dest="hf", metavar="COMMAND", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        found = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        found.set_defaults(leaf=found)
        if name != "trainer":
            add = found.add_argument
            add("--run", required=True, metavar="NAME", help="name of the run, a label of its Jobs")
            add("--namespace", default="", help="user or organisation of the Jobs; empty: yours")
            add("--hub-patience-s", type=_seconds, default=300.0, help="a Hub that does not answer")
            add("--poll-s", type=_seconds, default=5.0, help="between two looks, seconds")
        return found

    _add_up(command("up", "start a run: bucket, replicas, and when they serve, the trainer"))
    status = command("status", "show the Jobs of a run and what they cost")
    status.add_argument("--all", action="store_true", help="of earlier launches too")
    status.add_argument("--json", action="store_true", help="as JSON")
    logs = command("logs", "show the log of a run's trainer, or of one replica")
    logs.add_argument("--replica", type=int, default=None, help="this one's, from 0")
    logs.add_argument("--follow", "-f", action="store_true", help="until the Job ends")
    logs.add_argument("--tail", type=int, default=None, help="only so many last lines")
    command("down", "end every Job of a run")
    trainer = command("trainer", "what the trainer's Job runs; for use inside it only")
    trainer.usage = "rollmux deploy hf trainer -- COMMAND..."


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rollmux deploy hf up --run NAME --model MODEL [options] -- COMMAND..."
    add = parser.add_argument
    add("--model", required=True, help="the base model, as vLLM takes it")
    add("--replicas", type=_count, default=2, help="vLLM Jobs")
    add("--replica-flavor", default="h200", help="hardware of a replica (hf jobs hardware)")
    add("--trainer-flavor", default="h200", help="hardware of the trainer")
    add("--image", default=IMAGE, help="image of a replica")
    add("--trainer-image", default=IMAGE, help="image of the trainer; needs Python 3.11")
    add(
        "--transport",
        choices=("expose", "network-group"),
        default="expose",
        help="how the trainer reaches replicas: an https URL with the token, or a private name",
    )
    add("--bucket", default="", help="NAMESPACE/NAME, made if missing; empty: rollmux-RUN, yours")
    add("--mount", default="/lora", help="where the bucket is in every Job")
    add("--max-staleness", type=_count, default=4, help="of the trainer, in policies")
    add("--max-lora-rank", type=_count, default=32, help="rounded up to one that vLLM takes")
    add("--max-model-len", type=_count, default=8192, help="prompt and reply, tokens")
    add("--tensor-parallel-size", type=_count, default=1, help="GPUs of one replica")
    add("--vllm-arg", action="append", default=[], metavar="ARG", help="more for vllm serve")
    add("--replica-env", action="append", default=[], metavar="K=V", help="environment of replicas")
    add(
        "--replica-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="variable here that replicas get as a secret (HF_TOKEN for a gated model)",
    )
    add("--env", action="append", default=[], metavar="K=V", help="environment of the trainer")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="variable here that the trainer gets as a secret; HF_TOKEN it has",
    )
    add("--run-arg", action="append", default=[], metavar="ARG", help="more for rollmux run")
    add(
        "--install",
        default=f"rollmux[hf]=={version()}",
        metavar="REQUIREMENT",
        help="what the trainer's Job installs rollmux from; none: its image has it",
    )
    add(
        "--push",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="push adapters to the replicas; else they read them from the bucket",
    )
    add("--timeout", type=_duration, default=6 * 3600, metavar="TIME", help="of the trainer; 90m")
    add("--start-timeout-s", type=_count, default=1800, help="for the replicas, then the trainer")
    add(
        "--keep-replicas",
        action="store_true",
        help="do not end the replicas when COMMAND ends",
    )
    add("--max-replacements", type=_count0, default=5, help="Jobs started for lost replicas")
    add("--flush-path", default="", metavar="DIR", help="wait at the end until the Hub lists it")
    add("--wait", action="store_true", help="stay until the trainer ends; exit 0 if it completed")
    add("--dry-run", action="store_true", help="show the Jobs and the price, start nothing")


def _seconds(text: str) -> float:
    return _ranged(float(text), text, least=1e-3)


def _count(text: str) -> int:
    return int(_ranged(int(text), text, least=1))


def _count0(text: str) -> int:
    return int(_ranged(int(text), text, least=0))


def _duration(text: str) -> int:
    """Seconds, or ``90m``, ``4h``, ``2d``."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:], 0)
    return int(_ranged(float(text[:-1]) * unit if unit else float(text), text, least=60))


def _ranged(value: float, text: str, *, least: float) -> float:
    if not least <= value < 10_000_000:
        raise argparse.ArgumentTypeError(f"{text} is out of range; give {least:g} or more")
    return value


def _pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise PlanError(f"{flag}: write it like NAME=VALUE")
        pairs[name] = value
    return pairs


# --- commands -----------------------------------------------------------------------------------


def main(
    parsed: argparse.Namespace, command: Sequence[str] | None, environ: Mapping[str, str]
) -> int:
    """Carry out one command; its exit code."""
    if command is not None and parsed.hf not in TAKES_COMMAND:
        raise SettingsError(f"{parsed.hf} takes no command after --")
    try:
        match parsed.hf:
            case "up":
                return _up(parsed, command or (), environ)
            case "status":
                return _status(parsed, environ)
            case "logs":
                return _logs(parsed, environ)
            case "down":
                return _down(parsed, environ)
            case _:
                return _trainer(command or (), environ)
    except PlanError as error:
        raise SettingsError(str(error)) from error
    except (HubError, StartError) as error:
        stderr(str(error))
        return FAILURE
    except Interrupted as error:
        return 128 + error.number


def _plan(
    given: argparse.Namespace, command: Sequence[str], namespace: str, environ: Mapping[str, str]
) -> Plan:
    if not command:
        raise PlanError("no trainer command; write it after --: up ... -- python train.py")
    for name in (*given.secret, *given.replica_secret):
        if name != "HF_TOKEN" and not environ.get(name):
            raise PlanError(f"--secret: the environment has no variable of that name: set {name}")
    mount = given.mount.rstrip("/")
    return Plan(
        run=given.run,
        launch=random_secrets.token_hex(6),
        namespace=namespace,
        model=given.model,
        command=tuple(command),
        replicas=given.replicas,
        transport=given.transport,
        replica_flavor=given.replica_flavor,
        trainer_flavor=given.trainer_flavor,
        image=given.image,
        trainer_image=given.trainer_image,
        bucket=given.bucket or f"{namespace}/rollmux-{given.run}",
        mount=mount or "/",
        max_staleness=given.max_staleness,
        max_lora_rank=given.max_lora_rank,
        max_model_len=given.max_model_len,
        tensor_parallel_size=given.tensor_parallel_size,
        vllm_args=tuple(given.vllm_arg),
        replica_env=_pairs("--replica-env", given.replica_env),
        replica_secrets=tuple(given.replica_secret),
        env=_pairs("--env", given.env),
        secrets=tuple(given.secret),
        run_args=tuple(given.run_arg),
        install=given.install,
        push_module=PUSH_MODULE.read_text("utf-8") if given.push else "",
        trainer_timeout_s=given.timeout,
        start_timeout_s=given.start_timeout_s,
        keep_replicas=given.keep_replicas,
        max_replacements=given.max_replacements,
        flush_path=given.flush_path.rstrip("/"),
        poll_s=given.poll_s,
        patience_s=given.hub_patience_s,
    )


def _up(given: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    if given.dry_run:
        return _dry_run(given, command, environ)
    # What does not need the Hub is checked before it is asked.
    _plan(given, command, given.namespace or "me", environ)
    stop = Stop()
    who = credentials(environ)
    with stop.catching(), _hub(given, who, stop) as hub:
        plan = _plan(given, command, hub.login(given.namespace), environ)
        values = {name: environ.get(name, "") for name in (*plan.secrets, *plan.replica_secrets)}
        values |= {"HF_TOKEN": who.token, PUSH_KEY: random_secrets.token_urlsafe(32)}
        stderr(_price(plan, hub))
        trainer = up(plan, hub, values, stop, stderr)
        stop.masked = False
        print(f"run {plan.run} is up: {trainer.url}")
        for name in ("status", "logs -f", "down"):
            print(f"  rollmux deploy hf {name} --run {plan.run}")
        sys.stdout.flush()
        return _wait(plan, trainer.id, hub, stop) if given.wait else FINE


def _wait(plan: Plan, id: str, hub: Hub, stop: Stop) -> int:
    try:
        completed = wait(plan.run, id, hub, stop, stderr, poll_s=plan.poll_s)
    except Interrupted as first:
        # The run needs nobody here. Who means to end it says so twice.
        stop.forget()
        stderr(f"the run goes on; once more within {SECOND_SIGNAL_S:g} s ends all of it")
        try:
            stop.sleep(SECOND_SIGNAL_S)
        except Interrupted:
            stop.masked = True
            hub.cancel_all({"run": plan.run}, plan.poll_s)
        raise first from None
    if not plan.keep_replicas:
        hub.cancel_all(plan.labels, plan.poll_s)  # the trainer's Job did; unless it was killed
    return FINE if completed else FAILURE


def _dry_run(given: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    namespace = given.namespace
    try:
        who = credentials(environ)
        with Hub(who, say=lambda _: None, patience_s=DRY_PATIENCE_S) as hub:
            namespace = hub.login(namespace)
            plan = _plan(given, command, namespace, environ)
            price = _price(plan, hub)
    except HubError as error:
        plan = _plan(given, command, namespace or "YOU", environ)
        price = f"price unknown ({error})"
    print(f"run {plan.run} of {plan.namespace}, transport {plan.transport}")
    print(f"bucket {plan.bucket}, private, at {plan.mount}")
    for spec in plan.jobs():
        _show(spec)
    print(price)
    return FINE


def _price(plan: Plan, hub: Hub) -> str:
    """What the run costs, in one line."""
    try:
        prices = hub.prices()
    except HubError as error:
        return f"price unknown ({error})"
    hourly, most = 0.0, 0.0
    for spec in plan.jobs():
        if spec.flavor not in prices:
            return f"price unknown (the Hub's hardware list has no {spec.flavor})"
        price = prices[spec.flavor] + (EXPOSED_USD_HOUR if spec.expose else 0.0)
        hourly += price
        most += price * spec.timeout_s / 3600
    return f"price ${hourly:.2f} an hour; ${most:.2f} if every Job ran to its timeout"


def _show(spec: JobSpec) -> None:
    print(f"{spec.name}: {spec.flavor}, {spec.image}, at most {spec.timeout_s / 3600:.1f} h")
    print(f"  labels {' '.join(f'{k}={v}' for k, v in spec.labels.items())}")
    for name, value in spec.env.items():
        shown = value if len(value) <= SHOWN else f"({len(value)} characters)"
        print(f"  env {name}={shown}")
    for name in spec.secrets:
        print(f"  secret {name}")
    for volume in spec.volumes:
        mode = "read-only" if volume.read_only else "read and write"
        print(f"  {volume.bucket} at {volume.mount}, {mode}")
    if spec.expose:
        print(f"  port {spec.expose[0]} exposed, for holders of a token")
    if spec.network_group:
        print(f"  network group {spec.network_group}, as {', '.join(spec.network_aliases)}")
    print(f"  {spec.command[-1]}")


def _status(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    with _hub(given, credentials(environ)) as hub:
        hub.login(given.namespace)
        jobs = _of_run(hub, given.run, all_launches=given.all)
        price = _price_now(jobs, hub)
    if given.json:
        rows = [_row(job) for job in jobs]
        print(json.dumps({"run": given.run, "usd_per_hour": price, "jobs": rows}, indent=2))
    else:
        for job in jobs:
            row = _row(job)
            print(f"{row['name']:<12} {row['stage']:<10} {row['flavor']:<12} {row['url']}")
            if job.status.message:
                print(f"  {job.status.message}")
        cost = "unknown" if price is None else f"${price:.2f} an hour"
        print(f"run {given.run}: {len(jobs)} Jobs, price now {cost}")
    return FINE if jobs else FAILURE


def _price_now(jobs: Sequence[JobInfo], hub: Hub) -> float | None:
    """Dollars an hour; nothing where the Hub does not tell."""
    try:
        prices = hub.prices()
    except HubError as error:
        stderr(str(error))
        return None
    return live_price((job for job in jobs if job.status.stage in ("RUNNING",)), prices)


def _row(job: JobInfo) -> dict[str, Any]:
    return {
        "name": name_of(job),
        "id": job.id,
        "stage": job.status.stage,
        "message": job.status.message,
        "flavor": str(job.flavor),
        "launch": (job.labels or {}).get("launch"),
        "started_at": job.started_at.isoformat() if job.started_at else None,
        "expose_urls": job.status.expose_urls or [],
        "url": job.url,
    }


def _of_run(hub: Hub, run: str, *, all_launches: bool = False) -> list[JobInfo]:
    """A run's Jobs by name; of its last launch, if it was launched several times."""
    jobs = hub.jobs({"run": run}, live=False)
    if jobs and not all_launches:
        last = max(jobs, key=lambda job: (job.created_at is not None, job.created_at, job.id))
        launch = (last.labels or {}).get("launch")
        jobs = [job for job in jobs if (job.labels or {}).get("launch") == launch]
    return sorted(jobs, key=lambda job: (name_of(job), job.id))


def _logs(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    wanted = TRAINER if given.replica is None else f"replica {given.replica}"
    with _hub(given, credentials(environ)) as hub:
        hub.login(given.namespace)
        jobs = [job for job in _of_run(hub, given.run) if name_of(job) == wanted]
        if not jobs:
            raise HubError(f"no Job is the {wanted} of the run {given.run}")
        for line in hub.logs(jobs[-1].id, follow=given.follow, tail=given.tail):
            print(line, flush=True)
    return FINE


def _down(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    with _hub(given, credentials(environ)) as hub:
        hub.login(given.namespace)
        count = hub.cancel_all({"run": given.run}, given.poll_s)
    print(f"run {given.run}: {count} Jobs ended" if count else f"run {given.run}: nothing lives")
    return FINE


def _trainer(command: Sequence[str], environ: Mapping[str, str]) -> int:
    plan = Plan.from_json(environ.get(PLAN, ""))
    who = credentials(environ)
    watch_stop = Stop()
    with (
        Hub(who, say=stderr, patience_s=plan.patience_s) as hub,
        Hub(who, say=stderr, patience_s=plan.patience_s, stop=watch_stop) as watch_hub,
    ):
        hub.login(plan.namespace)
        watch_hub.login(plan.namespace)
        return run_trainer(plan, command, hub, watch_hub, watch_stop, environ, stderr)


def _hub(given: argparse.Namespace, who: Credentials, stop: Stop | None = None) -> Hub:
    retry_s = min(1.0, given.poll_s)
    return Hub(who, say=stderr, stop=stop, patience_s=given.hub_patience_s, retry_s=retry_s)

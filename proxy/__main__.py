"""The command line: ``rollmux``, or ``python -m proxy`` from a checkout.

The one place that reads ``os.environ``, and the one from which imports may reach down, inside a
command's function.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from proxy import settings as options
from proxy.settings import Loaded, SettingsError, read_secrets
from proxy.version import version
from routing.router import Router, RouterSettings

FINE, FAILURE, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

OPTIONS_HELP = """

Each option is also ROLLMUX_<NAME> in the environment (--replica: ROLLMUX_REPLICAS, separated by
commas) and a key of the TOML file given with --config. The command line wins over the environment,
the environment over the file."""


class _Parser(argparse.ArgumentParser):
    """Bad usage is one line and exit code 2, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 failure, 2 bad usage or settings."""
    args = list(sys.argv[1:] if argv is None else argv)
    # A console script does not look for modules where it was started; --router module:factory
    # should. Last, so that nothing there can hide a module of ours.
    with contextlib.suppress(FileNotFoundError):  # that folder was removed meanwhile
        sys.path.append(os.getcwd())
    try:
        try:
            return _command(args, os.environ)
        finally:
            _flush()
    except SettingsError as error:
        return _say(args, str(error), BAD_USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        return FAILURE
    except Exception as error:  # the outermost guard: no traceback reaches a user
        if _is_debug(args, os.environ):
            traceback.print_exc()
        what = " ".join(str(error).split()) or "no more is known"
        hint = "--log-level debug shows where"
        return _say(args, f"{type(error).__name__}: {what} ({hint})", FAILURE)


def _flush() -> None:
    """Here: at the interpreter's end a failure would be a traceback and exit code 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # What could not be written is tried once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _say(args: Sequence[str], message: str, code: int) -> int:
    command = f" {args[0]}" if args and not args[0].startswith("-") else ""
    print(f"rollmux{command}: {message}", file=sys.stderr)
    return code


def _is_debug(args: Sequence[str], environ: Mapping[str, str]) -> bool:
    # Before the settings are read, or when they cannot be: look for the word itself.
    words = [*args, f"--log-level={environ.get('ROLLMUX_LOG_LEVEL', '')}"]
    return "--log-level=debug" in words or ("--log-level", "debug") in pairwise(words)


def _command(args: list[str], environ: Mapping[str, str]) -> int:
    trainer: list[str] | None = None
    if args and args[0] in ("run", "deploy") and "--" in args:
        # Split here and not by argparse, so that COMMAND is passed on untouched.
        cut = args.index("--")
        args, trainer = args[:cut], args[cut + 1 :]
    parser, commands = parsers()
    parsed, extra = parser.parse_known_args(args)
    if extra:
        _refuse(getattr(parsed, "leaf", commands[parsed.command]), extra)
    given = vars(parsed)
    match parsed.command:
        case "serve":
            return _serve(given, environ)
        case "run":
            return _run(args[1:], trainer, given, environ)
        case "demo":
            return _demo(parsed)
        case "replay":
            return _replay(parsed)
        case "deploy":
            return _deploy(parsed, trainer, environ)
        case "doctor":
            return _doctor(given, environ)
        case _:
            return _routers(parsed.check)


def _refuse(parser: argparse.ArgumentParser, extra: list[str]) -> NoReturn:
    if "--" in extra:
        parser.error("only `rollmux run` and `deploy hf up` take a command after --")
    word = next((w for w in extra if w.startswith("-")), extra[0])
    if not word.startswith("-"):
        parser.error(f"{word!r} is not understood here; options start with --")
    flag = word.partition("=")[0]
    known = list(parser._option_string_actions)
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.0)[0]
    parser.error(f"unknown option {flag}; the nearest is {nearest}")


# --- commands -----------------------------------------------------------------------------------


def _load(given: Mapping[str, object], environ: Mapping[str, str]) -> Loaded:
    fields = {info.field for info in options.options()} | {"config"}
    return options.load({name: v for name, v in given.items() if name in fields}, environ)


def _serve(given: Mapping[str, object], environ: Mapping[str, str]) -> int:
    loaded = _load(given, environ)
    secrets = read_secrets(loaded.settings, environ)
    from proxy.serve import serve

    return serve(loaded.settings, secrets, loaded.notes)


def _run(
    args: list[str],
    trainer: list[str] | None,
    given: Mapping[str, object],
    environ: Mapping[str, str],
) -> int:
    if not trainer:
        raise SettingsError(
            "no trainer command; write it after --, as in: run ... -- python train.py"
        )
    # The daemon reads the same options again; reading them here stops a bad one before anything
    # is started.
    settings = _load(given, environ).settings
    flush_path = _flush_path(given["flush_path"], settings.bucket_gate)
    api_key = read_secrets(settings, environ).api_key
    from trainer_entry.run import run

    return run(
        _serve_args(args),
        trainer,
        environ,
        host=settings.host,
        port=settings.port,
        start_timeout_s=settings.start_timeout_s,
        drain_s=settings.drain_s,
        take_over=bool(given["take_over"]),
        flush_path=flush_path,
        api_key=api_key or "",
        own_state_file=settings.state_file is None,
    )


def _serve_args(args: list[str]) -> list[str]:
    """Without what is for ``run`` itself."""
    kept, words = [], iter(args)
    for word in words:
        if word == "--flush-path":
            next(words, None)
        elif word != "--take-over" and not word.startswith("--flush-path="):
            kept.append(word)
    return kept


def _flush_path(given: object, bucket_gate: str | None) -> str:
    if not given:
        return ""
    if bucket_gate is None:
        raise SettingsError("--flush-path: which bucket? give --bucket-gate NAMESPACE/BUCKET=MOUNT")
    path, mount = Path(str(given)).absolute(), Path(bucket_gate.partition("=")[2])
    if not path.is_relative_to(mount):
        raise SettingsError(f"--flush-path: {path} is not below {mount}, where the bucket is")
    return str(path)


def _deploy(
    parsed: argparse.Namespace, command: list[str] | None, environ: Mapping[str, str]
) -> int:
    from deploy.hf_jobs.command import main as deploy

    return deploy(parsed, command, environ)


def _demo(parsed: argparse.Namespace) -> int:
    from benchmarks.demo import main as demo

    return demo(parsed)


FLEET = (
    "router", "replicas", "spill_threshold", "cache_tokens", "max_num_seqs", "step_ms",
    "sequence_us", "prefill_us",
)  # fmt: skip
"""Options of replay that say something of simulated replicas and of what routes to them."""
TRAINER_LOOP = (
    "samples_per_step", "queue", "sync_every", "sync_s", "max_staleness", "steps", "pause",
)  # fmt: skip
"""Those that say something of a simulated trainer."""
SERVER = ("speed", "model", "vocab_size", "replica_metrics", "api_key_env")
"""Those of a real server. All of these are None unless they were given."""


def _replay(parsed: argparse.Namespace) -> int:
    if parsed.url is not None:
        _refuse_given(parsed, FLEET, "is the server's own with --url, which simulates nothing")
        _refuse_given(parsed, ("trainer_step_s", *TRAINER_LOOP), "is simulated, not sent to --url")
        from benchmarks.replay_http import main as replay_http

        return replay_http(parsed)
    _refuse_given(parsed, SERVER, "goes with --url only")
    if parsed.trainer_step_s is not None:
        from benchmarks.what_if import main as what_if

        return what_if(parsed)
    _refuse_given(parsed, TRAINER_LOOP, "goes with --trainer-step-s only")
    from benchmarks.replay import main as replay

    return replay(parsed)


def _refuse_given(parsed: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """An option that would change nothing is told, not ignored."""
    for name in names:
        if getattr(parsed, name) is not None:
            raise SettingsError(f"--{name.replace('_', '-')}: {why}")


def _doctor(given: Mapping[str, object], environ: Mapping[str, str]) -> int:
    loaded = _load(given, environ)
    secrets = read_secrets(loaded.settings, environ)
    from deploy import checkup

    for note in loaded.notes:
        checkup.to_stderr(note)
    wanted = checkup.read_wanted(given)
    ok = checkup.main(
        loaded.settings, secrets, wanted, out=lambda line: print(line), progress=checkup.to_stderr
    )
    return FINE if ok else FAILURE


def _routers(check: str | None) -> int:
    from routing import contract, registry

    if check is None:
        for router in registry.installed():
            state = f"cannot be loaded: {router.error}" if router.error else router.dist
            print(f"{router.name:<18} {router.value:<36} {state}")
        return FINE

    def create(settings: RouterSettings) -> Router:
        return registry.load(check, settings)

    try:
        create(RouterSettings())
        faults = contract.check(create)
    except registry.RouterError as error:
        raise SettingsError(f"--check: {error}") from error
    for fault in faults:
        print(f"{check}: {fault}")
    if not faults:
        print(f"{check}: keeps the contract of routing.router.Router")
    return FAILURE if faults else FINE


# --- parsers ------------------------------------------------------------------------------------


def parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="rollmux",
        description="Makes many vLLM replicas look like one vLLM server to a trainer.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rollmux {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, help: str, description: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}. {description}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    serve = command("serve", "run the daemon in the foreground", OPTIONS_HELP)
    _add_settings(serve, inherited_socket=True)
    run = command(
        "run",
        "start the daemon, wait for the fleet, run a trainer, stop it all",
        f"The trainer's command is run\nunmodified and its exit code is passed on.{OPTIONS_HELP}",
    )
    run.usage = "rollmux run [--take-over] [--flush-path DIR] [serve options] -- COMMAND..."
    run.add_argument(
        "--take-over",
        action="store_true",
        help="clean the fleet even while a replica generates for someone else (default: off)",
    )
    run.add_argument(
        "--flush-path",
        metavar="DIR",
        help="after COMMAND, wait up to 60 s until the bucket of --bucket-gate lists every file "
        "in this folder (default: none)",
    )
    _add_settings(run, inherited_socket=False)
    demo = command("demo", "show the whole system on this machine, with simulated replicas")
    demo.add_argument(
        "--seconds", type=_positive(float), default=25.0, help="how long (default: %(default)g s)"
    )
    demo.add_argument(
        "--replicas", type=_positive(int), default=2, help="how many (default: %(default)d)"
    )
    demo.add_argument(
        "--push",
        action="store_true",
        help="push adapters to the replicas instead of waiting for the bucket (default: off)",
    )
    demo.add_argument(
        "--json", action="store_true", help="end with JSON instead of a table (default: off)"
    )
    replay = command(
        "replay",
        "send a recorded trace through policies and simulated replicas, or to a server",
        "Reads what\n--record writes, and plain Mooncake traces; docs/replay.md explains it.",
    )
    replay.add_argument(
        "trace", metavar="TRACE", nargs="?", default=None, help="the file; NAME.zst is unpacked"
    )
    replay.add_argument(
        "--workload",
        metavar="NAME[:KEY=VALUE,…]",
        default=None,
        help="instead of TRACE, a made-up one: grpo, near-duplicates, agents or few-shot (default: "
        "none)",
    )
    replay.add_argument(
        "--router",
        metavar="NAME|module:factory",
        action="append",
        help="a policy; repeat it to see several side by side (default: prefix)",
    )
    replay.add_argument(
        "--replicas",
        metavar="N[,N…]",
        type=_several(_positive(int)),
        default=None,
        help="how many are simulated (default: as many as the trace names, else 2)",
    )
    replay.add_argument(
        "--inflight",
        metavar="N[,N…]",
        type=_several(_positive(int)),
        default=None,
        help="send the next request as soon as fewer than N rollouts are in flight (default: "
        "none, requests are sent at the times recorded)",
    )
    replay.add_argument(
        "--spill-threshold",
        metavar="N[,N…]",
        type=_several(_positive(int, zero=True)),
        default=None,
        help="how many rollouts ahead of the least loaded replica the favourite may be (default: "
        "8)",
    )
    replay.add_argument(
        "--cache-tokens",
        metavar="N[,N…]",
        type=_several(_positive(int, bound=1_000_000_000)),
        default=None,
        help="size of each replica's prefix cache, in tokens (default: 2000000)",
    )
    replay.add_argument(
        "--max-num-seqs",
        metavar="N[,N…]",
        type=_several(_positive(int)),
        default=None,
        help="sequences that a replica runs at once (default: 256)",
    )
    replay.add_argument(
        "--step-ms",
        metavar="MS[,MS…]",
        type=_several(_positive(float)),
        default=None,
        help="milliseconds that a replica takes for one decode step (default: 8)",
    )
    replay.add_argument(
        "--sequence-us",
        metavar="US[,US…]",
        type=_several(_positive(float, zero=True)),
        default=None,
        help="microseconds that each sequence adds to a decode step (default: 20)",
    )
    replay.add_argument(
        "--prefill-us",
        metavar="US[,US…]",
        type=_several(_positive(float, zero=True)),
        default=None,
        help="microseconds that a replica takes for a token of a prompt (default: 20)",
    )
    replay.add_argument(
        "--seed",
        metavar="N",
        type=_positive(int, zero=True),
        default=0,
        help="of what a policy draws at random, and of the prompts sent to --url (default: "
        "%(default)d)",
    )
    replay.add_argument(
        "--trainer-step-s",
        metavar="S[,S…]",
        type=_several(_positive(float)),
        default=None,
        help="simulate the loop of a trainer that takes so many seconds for a step, forward, "
        "backward and optimizer, and tell which side waits (default: none, no trainer)",
    )
    replay.add_argument(
        "--samples-per-step",
        metavar="N[,N…]",
        type=_several(_positive(int)),
        default=None,
        help="of --trainer-step-s: rollouts that a step takes (no default, it is needed)",
    )
    replay.add_argument(
        "--queue",
        metavar="N[,N…]",
        type=_several(_positive(int)),
        default=None,
        help="of --trainer-step-s: rollouts that its queue holds (default: 1024)",
    )
    replay.add_argument(
        "--sync-every",
        metavar="N[,N…]",
        type=_several(_positive(int)),
        default=None,
        help="of --trainer-step-s: steps from one adapter to the next (default: 4)",
    )
    replay.add_argument(
        "--sync-s",
        metavar="S[,S…]",
        type=_several(_positive(float, zero=True)),
        default=None,
        help="of --trainer-step-s: seconds from a pause to the end of its sync (default: 8.5)",
    )
    replay.add_argument(
        "--max-staleness",
        metavar="N[,N…]",
        type=_several(_positive(int, zero=True)),
        default=None,
        help="of --trainer-step-s: rollouts older than so many adapters are dropped (default: 4)",
    )
    replay.add_argument(
        "--steps",
        metavar="N",
        type=_positive(int),
        default=None,
        help="of --trainer-step-s: how many steps are simulated (default: 200)",
    )
    replay.add_argument(
        "--pause",
        choices=("eager", "lazy"),
        default=None,
        help="of --trainer-step-s: whether a sync stops generation (default: both, side by side)",
    )
    replay.add_argument(
        "--url",
        metavar="URL",
        default=None,
        help="send it over HTTP instead, to rollmux, a vLLM or what looks like one (default: none)",
    )
    replay.add_argument(
        "--speed",
        metavar="X",
        type=_positive(float),
        default=None,
        help="to --url: so many times as fast as recorded (default: 1, unless --inflight is given)",
    )
    replay.add_argument(
        "--model",
        metavar="NAME",
        default=None,
        help="to --url: the model to ask for (default: as recorded, else the server's first)",
    )
    replay.add_argument(
        "--vocab-size",
        metavar="N",
        type=_positive(int),
        default=None,
        help="to --url: token ids of the prompts are below it (default: 32000)",
    )
    replay.add_argument(
        "--replica-metrics",
        metavar="URL",
        action="append",
        help="to --url: a replica whose /metrics tells what came from its cache; repeat it for "
        "each (default: those that rollmux tells of)",
    )
    replay.add_argument(
        "--api-key-env",
        metavar="NAME",
        default=None,
        help="to --url: environment variable with the server's key (default: none)",
    )
    replay.add_argument(
        "--json", action="store_true", help="print JSON instead of a table (default: off)"
    )
    replay.add_argument(
        "--html",
        metavar="PATH",
        default=None,
        help="write the report as a page with plots too (default: none)",
    )
    doctor = command(
        "doctor",
        "check a fleet before money is spent, one line a check",
        f"Exits with 1 if a check fails.\nWhat each means is in docs/doctor.md.{OPTIONS_HELP}",
    )
    doctor.add_argument(
        "--staleness",
        metavar="N",
        type=_positive(int, zero=True),
        default=4,
        help="the trainer's max_staleness (default: %(default)d, as TRL's)",
    )
    doctor.add_argument(
        "--rank",
        metavar="N",
        type=_positive(int),
        default=None,
        help="rank of the adapters that will be trained (default: none, it is not checked)",
    )
    doctor.add_argument(
        "--beacon",
        metavar="DIR",
        default=None,
        help="measure how long after it is written in this folder, where the trainer writes its "
        "adapters, each replica can load one (default: none, it is not measured)",
    )
    doctor.add_argument(
        "--hold-reply-s",
        metavar="SECONDS",
        type=_positive(float),
        default=None,
        help="hold one reply of each idle replica back for so long, and see whether it comes "
        "whole; pauses them meanwhile (default: none, it is not measured)",
    )
    doctor.add_argument(
        "--json", action="store_true", help="print one JSON object instead (default: off)"
    )
    _add_settings(doctor, inherited_socket=False)
    from deploy.hf_jobs.command import add_arguments

    add_arguments(command("deploy", "put replicas and trainer on Hugging Face Jobs"))
    routers = command("routers", "list the routing policies installed, or check one")
    routers.add_argument(
        "--check",
        metavar="module:factory",
        help="run the contract test on this policy instead (default: none)",
    )
    return parser, dict(commands.choices)


def _positive(
    kind: type[int] | type[float], *, zero: bool = False, bound: int = 1_000_000
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 <= value < bound or (value == 0 and not zero):
            least = "0 or more" if zero else "more than 0"
            raise argparse.ArgumentTypeError(f"{text} is out of range; give {least}")
        return value

    parse.__name__ = "number"  # argparse's message: invalid number value: 'x'
    return parse


def _several(one: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Values with commas between them: each is tried, once."""

    def parse(text: str) -> list[float]:
        return list(dict.fromkeys(one(value) for value in text.split(",")))

    parse.__name__ = "number"
    return parse


def _add_settings(parser: argparse.ArgumentParser, *, inherited_socket: bool) -> None:
    parser.add_argument(
        "--config", metavar="FILE.toml", help="settings file (default: ROLLMUX_CONFIG, else none)"
    )
    for info in options.options():
        option = info.option
        if option.command_line_only and not inherited_socket:
            continue
        default = info.default_text
        if option.unit:
            default += f" {option.unit}" if info.default is not None else f"; in {option.unit}"
        text = f"{info.help_text} (default: {default})".replace("%", "%%")
        # Values stay text here: settings.py reads them, wherever they come from.
        if not option.metavar:
            parser.add_argument(
                info.flag, dest=info.field, action=argparse.BooleanOptionalAction, help=text
            )
        else:
            parser.add_argument(
                info.flag,
                dest=info.field,
                metavar=option.metavar,
                action="append" if option.repeatable else "store",
                help=text,
            )


if __name__ == "__main__":
    sys.exit(main())

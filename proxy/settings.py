"""The settings of the daemon: every option with its default, unit and help, read once at the start.

``load`` merges command line over environment over TOML file, checks each value and the whole, and
never reads ``os.environ`` itself. ``Settings`` holds names of secrets, ``Secrets`` holds them.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import ssl
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

ENV_PREFIX: Final = "ROLLMUX_"

MAX_SECONDS: Final = 10_000_000.0
"""116 days. An event loop's timer overflows on much larger numbers; nobody means them."""

OLD_NAMES: Final[Mapping[str, str]] = {
    "UPSTREAM_URLS": "replicas",
    "PROXY_PORT": "port",
    "PROXY_BLOCK_SIZE": "block_size",
    "PROXY_MAX_TRACKED_BLOCKS": "max_tracked_blocks",
    "PROXY_IMBALANCE": "spill_threshold",
    "PROXY_LORA_LOAD_TIMEOUT_S": "load_timeout_s",
    "PROXY_LORA_RETRY_S": "load_retry_s",
}
"""Environment names of the script that people come from, understood for a drop-in start."""

FOREIGN_NAMES: Final = re.compile(r"ROLLMUX_(PUSH_KEY|PUSH_ROOT|PUSH_MAX_MB|URL|CONFIG|E2E_.*)")
"""Names with our prefix that belong to a recipe, a replica's push endpoint or the tests."""


class SettingsError(ValueError):
    """The operator's to mend: one line that names the setting, what is wrong, and the fix.

    The command line prints it and exits with 2.
    """


@dataclass(frozen=True, slots=True)
class Option:
    """What the help, the README's table and the readers need to know of one setting."""

    help: str
    parse: Callable[[Any], Any]
    """From text, or a TOML value, to the field's value; ``ValueError`` says what is wrong."""
    unit: str = ""
    metavar: str = ""
    """Empty for a switch."""
    default_text: str = ""
    """Shown instead of the default, where that is worked out at the start."""
    repeatable: bool = False
    """May be given several times on the command line; comma-separated elsewhere."""
    command_line_only: bool = False


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One setting under its three names."""

    field: str
    flag: str
    env: str
    """Empty where the environment cannot set it."""
    default: Any
    option: Option

    @property
    def help_text(self) -> str:
        """What it is for, for help and tables."""
        return self.option.help

    @property
    def default_text(self) -> str:
        """The default in words, for help and tables."""
        if self.option.default_text:
            return self.option.default_text
        if self.default is None or self.default == ():
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


# --- one value ----------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text; write it in quotes")
    text = value.strip()
    if not text:
        raise ValueError("is empty; give a value or leave it out")
    if not text.isprintable():
        raise ValueError("holds an unprintable character; remove it")
    return text


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        try:
            number = int(value.strip()) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{value!r} is not a whole number; give one from {low} to {high}")
        if not low <= number <= high:
            raise ValueError(f"{number} is out of range; give one from {low} to {high}")
        return number

    return parse


def _seconds(*, zero: bool = False) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"{value!r} is not a number of seconds; write it like 2.5")
        if number > MAX_SECONDS:
            raise ValueError(f"{value} s is too long; give at most {MAX_SECONDS:.0f}")
        if number < 0 or (number == 0 and not zero):
            least = "0 or more" if zero else "more than 0"
            raise ValueError(f"{value} s is too short; give {least}")
        return number

    return parse


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        word = value.strip().lower() if isinstance(value, str) else value
        if word not in words:
            raise ValueError(f"{value!r} is not known; give {' or '.join(words)}")
        return str(word)

    return parse


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{value!r} is neither on nor off; give true or false")


def _list(parse_one: Callable[[str], str]) -> Callable[[Any], tuple[str, ...]]:
    """Of a list, or of text split at commas and white space; each kept once is the caller's job."""

    def parse(value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise ValueError(f"{value!r} is not a list of texts")
        parts = [part for item in items for part in re.split(r"[,\s]+", item) if part]
        if items and not parts:
            raise ValueError("is empty; give a value or leave it out")
        return tuple(parse_one(part) for part in parts)

    return parse


def _variable(value: Any) -> str:
    """The name of an environment variable. What is not one may be a pasted secret: not shown."""
    name = _text(value)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            "is not the name of an environment variable; put the secret into a variable "
            "and give that variable's name"
        )
    return name


def _min_replicas(value: Any) -> int | Literal["all"]:
    if isinstance(value, str) and value.strip().lower() == "all":
        return "all"
    try:
        return _integer(1, 10_000)(value)
    except ValueError as error:
        raise ValueError(f"{error}, or all") from None


def _host(value: Any) -> str:
    """An address or name to listen on, without the brackets of an IPv6 literal."""
    host = _text(value).removeprefix("[").removesuffix("]")
    if re.search(r"[/\s@]", host) or (":" in host and not _is_address(host)):
        raise ValueError(
            f"{value!r} is not a host; give a name or an address, and the port with --port"
        )
    _check_host(host)
    return host


def _token_host(value: Any) -> str:
    """A host name as it stands in a replica's URL, or ``*.suffix``."""
    host = _host(value).lower()
    if "*" in host.removeprefix("*."):
        raise ValueError(f"{value!r} is not a host; a star may only stand first, as in *.hf.jobs")
    return host


def _bucket_mount(value: Any) -> str:
    text = _text(value)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+=/\S*", text):
        raise ValueError(f"{text!r} is not NAMESPACE/BUCKET=MOUNT; write it like me/run=/lora")
    return text


def _host_port(value: Any) -> str:
    host, colon, port = _text(value).rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{value!r} is not HOST:PORT; write it like replicas.default.svc:8000")
    _check_host(host)
    return f"{host}:{port}"


def _check_host(host: str) -> None:
    """What ``getaddrinfo`` would not even look up, raising what is no OSError."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        why = error.__cause__ or error
        raise ValueError(f"{host!r} cannot be a host's name ({why})") from None


def _hub_label(value: Any) -> str:
    text = _text(value)
    # A label's key and value: letters, digits, - and _ (huggingface_hub 2.4.0, update_job_labels).
    if not re.fullmatch(r"([\w.-]+/)?[A-Za-z0-9_-]{1,100}=[A-Za-z0-9_-]{1,100}", text):
        raise ValueError(f"{text!r} is not a Job's label; write it like run=NAME or ORG/run=NAME")
    return text


def replica_url(value: Any) -> str:
    """A replica's URL in one spelling: scheme and host in lower case, no slash at the end.

    :raises ValueError: one line, in which a password of the URL does not appear.
    """
    text = _text(value)
    if "@" in text:
        raise ValueError("the URL holds credentials; leave them out and give --token-env NAME")
    if "://" not in text:
        raise ValueError(f"{text!r} has no scheme; write http://{text.lstrip('/')}")
    if re.search(r"[\s\\]", text):
        raise ValueError(f"{text!r} holds a space or a backslash; remove it")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not a URL ({error}); write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{text!r} is not http:// or https://; write http://HOST:PORT")
    if not host:
        raise ValueError(f"{text!r} names no host; write {parts.scheme}://HOST:PORT")
    _check_host(host)
    if port == 0:
        raise ValueError(f"{text!r} names port 0; give the port the replica listens on")
    if "?" in text or "#" in text:
        raise ValueError(f"{text!r} has a query or a fragment; leave it out")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"{text!r} ends in /v1, which is added here; leave it out")
    shown_host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown_host}{f':{port}' if port else ''}{path}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on, or send to, ``host``.

    Not ``*.localhost``: RFC 6761 reserves it, but a resolver without that rule (plain glibc) asks
    the network's DNS, and a token would follow the answer.
    """
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# --- all values ---------------------------------------------------------------------------------


def _setting(
    default: Any,
    parse: Callable[[Any], Any],
    help: str,
    *,
    unit: str = "",
    metavar: str = "N",
    default_text: str = "",
    repeatable: bool = False,
    command_line_only: bool = False,
) -> Any:
    option = Option(help, parse, unit, metavar, default_text, repeatable, command_line_only)
    return field(default=default, metadata={"option": option})


def _time(default: float, help: str, *, zero: bool = False) -> Any:
    return _setting(default, _seconds(zero=zero), help, unit="s", metavar="SECONDS")


def _path(help: str) -> Any:
    return _setting(None, _text, help, metavar="PATH")


def _name_of_secret(help: str) -> Any:
    return _setting(None, _variable, help, metavar="NAME")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator chose. Read once by ``load``; passed down as an argument."""

    replicas: tuple[str, ...] = _setting(
        (),
        _list(replica_url),
        "a vLLM server, http:// or https://, may have a base path; repeat it for each",
        metavar="URL",
        repeatable=True,
    )
    replicas_file: str | None = _path("file with one URL a line, read again when it changes")
    replicas_dns: str | None = _setting(
        None,
        _host_port,
        "every address that HOST resolves to is a replica; resolved again and again",
        metavar="HOST:PORT",
    )
    replicas_hf_label: str | None = _setting(
        None,
        _hub_label,
        "every Hugging Face Job with this label that exposes a port is a replica; asked again and "
        "again, with HF_TOKEN",
        metavar="[NAMESPACE/]KEY=VALUE",
    )
    host: str = _setting(
        "127.0.0.1", _host, "address on which the trainer connects", metavar="HOST"
    )
    port: int = _setting(
        8000, _integer(0, 65_535), "port on which the trainer connects; 0 takes a free one"
    )
    token_env: str | None = _name_of_secret(
        "environment variable with the bearer token for replicas, sent on every call to them"
    )
    token_file: str | None = _path(
        "file with the bearer token, read again when it changes or is rejected"
    )
    token_over_http: bool = _setting(
        False,
        _switch,
        "send the token over plain http:// to hosts that are not loopback",
        metavar="",
    )
    token_hosts: tuple[str, ...] = _setting(
        (),
        _list(_token_host),
        "hosts that may get the token when a replica is added while running",
        metavar="HOST",
        repeatable=True,
    )
    api_key_env: str | None = _name_of_secret(
        "environment variable with the key that clients must send; needed when the host is not "
        "loopback"
    )
    admin_key_env: str | None = _name_of_secret(
        "environment variable with the key needed to change /proxy/replicas"
    )
    insecure: bool = _setting(
        False, _switch, "listen beyond loopback without an API key", metavar=""
    )
    router: str = _setting(
        "prefix",
        _text,
        "routing policy: a name from `rollmux routers`, or module:factory",
        metavar="NAME",
    )
    block_size: int | None = _setting(
        None,
        _integer(1, 65_536),
        "size of a hash block",
        unit="tokens",
        default_text="the replicas' own, else 16",
    )
    spill_threshold: int = _setting(
        8,
        _integer(0, 1_000_000),
        "how far ahead of the least loaded replica the favourite may be",
        unit="requests",
    )
    max_tracked_blocks: int = _setting(
        500_000, _integer(1, 100_000_000), "bound of the prefix table", unit="blocks"
    )
    load_timeout_s: float = _time(
        300, "deadline of one adapter publication, counted while enough replicas answer"
    )
    load_retry_s: float = _time(
        0.25, "wait between looks for an adapter that one replica cannot see yet"
    )
    load_retry_max_s: float = _time(2, "longest such wait")
    own_copies: str = _setting(
        "auto",
        _one_of("auto", "never"),
        "load adapters from the daemon's own copy, named by its bytes, or from the trainer's path",
        metavar="auto|never",
    )
    adapter_transport: str = _setting(
        "auto",
        _one_of("auto", "path", "push"),
        "how adapter files reach a replica: the shared path, or pushed to its own endpoint; auto "
        "pushes to those that have one",
        metavar="auto|path|push",
    )
    push_key_env: str | None = _name_of_secret(
        "environment variable with the key of the replicas' push endpoints; ROLLMUX_PUSH_KEY if "
        "that is set"
    )
    push_cache: str | None = _setting(
        None,
        _text,
        "folder for the daemon's copies of adapters that are pushed; must be local",
        metavar="PATH",
        default_text="rollmux-push-PORT among the temporary files",
    )
    push_cache_mb: int = _setting(4096, _integer(1, 1_000_000), "bound of that folder", unit="MB")
    bucket_gate: str | None = _setting(
        None,
        _bucket_mount,
        "before a load, wait until the Hub lists the adapter's files in this bucket, mounted there",
        metavar="NAMESPACE/BUCKET=MOUNT",
    )
    hub_endpoint: str = _setting(
        "https://huggingface.co",
        replica_url,
        "the Hub that --bucket-gate and --replicas-hf-label ask, with HF_TOKEN",
        metavar="URL",
    )
    retire_grace_s: float = _time(
        60, "an unloaded adapter is served until nobody has named it for so long", zero=True
    )
    pause: str = _setting(
        "lazy",
        _one_of("lazy", "eager"),
        "lazy: stop the replicas only for changes in place; eager: at every pause",
        metavar="lazy|eager",
    )
    min_replicas: int | Literal["all"] = _setting(
        1, _min_replicas, "replicas needed to go on", metavar="N|all", unit="replicas"
    )
    start_timeout_s: float = _time(
        1800, "wait for the whole fleet at the start; after it, --min-replicas are enough"
    )
    hold_s: float = _time(60, "wait of a generation for a ready replica, before 503", zero=True)
    outage_s: float = _time(
        1500, "wait of a control call while too few replicas answer, before 503", zero=True
    )
    probe_s: float = _time(5, "interval of the deep probes of each replica")
    stall_s: float = _time(60, "a deep probe unanswered for so long makes the replica down")
    control_timeout_s: float = _time(60, "one pause, resume, reset or unload on one replica")
    attempt_timeout_s: float = _time(120, "one attempt to load an adapter on one replica")
    body_timeout_s: float = _time(60, "a client's request body has to arrive within it")
    record: str | None = _path(
        "write a trace of the run, without prompts, to this file; compressed if it ends in .zst"
    )
    state_file: str | None = _path("small journal of the ledger, for a restart of the daemon")
    log_format: str = _setting(
        "text", _one_of("text", "json"), "shape of a log line", metavar="text|json"
    )
    log_level: str = _setting(
        "info",
        _one_of("debug", "info", "warning", "error"),
        "least severe log line written",
        metavar="debug|info|warning|error",
    )
    ca_file: str | None = _path("PEM file of a private certificate authority of the replicas")
    drain_s: float = _time(20, "wait for running requests at SIGTERM", zero=True)
    trust_env: bool = _setting(
        False,
        _switch,
        "let HTTP_PROXY, .netrc and the like steer the calls to replicas",
        metavar="",
    )
    fd: int | None = _setting(
        None,
        _integer(0, 1_000_000),
        "serve on this inherited listening socket; `rollmux run` gives it",
        command_line_only=True,
    )


def options() -> tuple[OptionInfo, ...]:
    """Every setting, in the order of the class."""
    return tuple(_info(f) for f in fields(Settings))


def _info(setting: Field[Any]) -> OptionInfo:
    option: Option = setting.metadata["option"]
    # The option is given once for each replica, so it is singular; the rest say "replicas".
    flag = "--replica" if setting.name == "replicas" else f"--{setting.name.replace('_', '-')}"
    env = "" if option.command_line_only else ENV_PREFIX + setting.name.upper()
    return OptionInfo(setting.name, flag, env, setting.default, option)


_OPTIONS: Final = {info.field: info for info in options()}


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and what the operator should be told once logging works."""

    settings: Settings
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it came, and where from, for the error."""

    label: str
    raw: Any = field(repr=False)


def load(argv_options: Mapping[str, Any], environ: Mapping[str, str]) -> Loaded:
    """Merge command line over environment over TOML file, and check all of it.

    :param argv_options: by field name, plus ``config``; what was not given is missing or ``None``.
    :raises SettingsError: one line, without a secret.
    """
    notes: list[str] = []
    config = argv_options.get("config") or environ.get(f"{ENV_PREFIX}CONFIG")
    given: dict[str, _Given] = {}
    if config:
        given |= _from_file(Path(config))
    variables, unknown = _from_environ(environ, notes)
    given |= variables
    given |= {
        name: _Given(_OPTIONS[name].flag, value)
        for name, value in argv_options.items()
        if name != "config" and value is not None
    }
    _refuse_unknown(unknown, given)
    settings = Settings(**{name: _parse(name, value) for name, value in given.items()})
    if settings.load_retry_max_s < settings.load_retry_s:
        if "load_retry_max_s" in given:
            raise SettingsError(
                f"{given['load_retry_max_s'].label}: {settings.load_retry_max_s:g} s is shorter "
                f"than --load-retry-s, {settings.load_retry_s:g} s; give at least that"
            )
        settings = replace(settings, load_retry_max_s=settings.load_retry_s)
    labels = {name: info.flag for name, info in _OPTIONS.items()}
    labels |= {name: value.label for name, value in given.items()}
    _check_files(settings, labels)
    _check_replicas(settings, labels)
    _check_exposure(settings, labels)
    secrets = read_secrets(settings, environ)
    if settings.adapter_transport == "push" and secrets.push_key is None:
        raise SettingsError(
            f"{labels['adapter_transport']}: push needs the key of the replicas' push endpoints; "
            f"set {PUSH_KEY}, or name its variable with --push-key-env"
        )
    return Loaded(settings, notes)


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--config: {path} is not UTF-8; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from error
    names = {key: i.field for i in _OPTIONS.values() if i.env for key in (i.flag[2:], i.field)}
    given: dict[str, _Given] = {}
    for key, value in table.items():
        name = names.get(key) or names.get(key.replace("_", "-"))
        if name is None:
            raise SettingsError(
                f"{path}: unknown key {key!r}; the nearest is {_nearest(key, names)!r}"
            )
        if name in given:
            raise SettingsError(f"{path}: {key!r} is given under two spellings; keep one")
        given[name] = _Given(f"{key} in {path}", value)
    return given


def _from_environ(
    environ: Mapping[str, str], notes: list[str]
) -> tuple[dict[str, _Given], list[str]]:
    """What the environment sets, and the names with our prefix that it cannot set."""
    ours = {info.env: info.field for info in _OPTIONS.values() if info.env}
    ours[f"{ENV_PREFIX}REPLICA"] = "replicas"
    given: dict[str, _Given] = {}
    unknown: list[str] = []
    service_links: list[str] = []
    # The old names first, so that a new one wins over them.
    for variable in (*OLD_NAMES, *sorted(v for v in environ if v.startswith(ENV_PREFIX))):
        value = environ.get(variable, "").strip()
        if _is_service_link(variable, value):
            service_links.append(variable)
        elif variable in OLD_NAMES:
            if value:
                name = OLD_NAMES[variable]
                given[name] = _Given(variable, value)
                notes.append(f"{variable} is understood; its name here is {_OPTIONS[name].env}")
        elif variable in ours:
            if value:  # an empty variable is how compose files and charts say "not set"
                given[ours[variable]] = _Given(variable, value)
        elif not FOREIGN_NAMES.fullmatch(variable):
            unknown.append(variable)
    if service_links:
        notes.append(f"skipped Kubernetes service links: {', '.join(service_links)}")
    # One process owns routing and counters, so what would start more of them is not obeyed.
    ignored = sorted(v for v in environ if v == "WEB_CONCURRENCY" or v.startswith("UVICORN_"))
    if ignored:
        notes.append(f"ignored, the daemon is one process: {', '.join(ignored)}")
    return given, unknown


def _is_service_link(variable: str, value: str) -> bool:
    """A Service called ``rollmux`` makes Kubernetes set ``ROLLMUX_PORT=tcp://…`` in every pod."""
    if value.startswith(("tcp://", "udp://", "sctp://")):
        return True
    return "_SERVICE_" in variable or "_PORT_" in variable


def _refuse_unknown(unknown: Iterable[str], given: Mapping[str, _Given]) -> None:
    # The operator may have called a secret's variable ROLLMUX_TOKEN and pointed --token-env at it.
    secrets = {PUSH_KEY} | {given[name].raw for name in SECRET_NAMES if name in given}
    names = [info.env for info in _OPTIONS.values() if info.env]
    for variable in unknown:
        if variable not in secrets:
            raise SettingsError(
                f"{variable}: unknown name in the environment; the nearest is "
                f"{_nearest(variable, names)}; rename it or unset it"
            )


def _nearest(word: str, names: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(names), n=1, cutoff=0.0)[0]


def _parse(name: str, given: _Given) -> Any:
    try:
        return _OPTIONS[name].option.parse(given.raw)
    except ValueError as error:
        raise SettingsError(f"{given.label}: {error}") from None


# --- the whole ----------------------------------------------------------------------------------

FOLLOWED: Final = ("replicas_file", "replicas_dns", "replicas_hf_label")
"""Settings that name a source of replicas which changes while we run."""


def _check_files(settings: Settings, labels: Mapping[str, str]) -> None:
    for name in ("replicas_file", "token_file", "ca_file"):
        path = getattr(settings, name)
        if path is not None and not (Path(path).is_file() and os.access(path, os.R_OK)):
            raise SettingsError(f"{labels[name]}: {path} is not a file that can be read; check it")
    for name in ("record", "state_file"):
        path = getattr(settings, name)
        if path is None:
            continue
        if Path(path).is_dir():
            raise SettingsError(f"{labels[name]}: {path} is a folder; give a file in it")
        if not os.access(Path(path).resolve().parent, os.W_OK):
            raise SettingsError(
                f"{labels[name]}: nothing can be written beside {path}; make its folder first"
            )
    if settings.ca_file is not None:
        try:
            ssl.create_default_context(cafile=settings.ca_file)
        except ssl.SSLError as error:
            raise SettingsError(
                f"{labels['ca_file']}: {settings.ca_file} holds no certificate in PEM form"
            ) from error


def _check_replicas(settings: Settings, labels: Mapping[str, str]) -> None:
    label = labels["replicas"]
    followed = [name for name in FOLLOWED if getattr(settings, name)]
    if not (settings.replicas or followed):
        others = [f"--{name.replace('_', '-')}" for name in FOLLOWED]
        ways = ["--replica URL", "ROLLMUX_REPLICAS", "replicas in the --config file"]
        ways += others
        raise SettingsError(f"no replica is configured; give {', '.join(ways[:-1])} or {ways[-1]}")
    seen: set[tuple[str, int, str]] = set()
    for url in settings.replicas:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname or ""
        where = (host, port, parts.path)
        if where in seen:
            raise SettingsError(f"{label}: {url} is given twice; keep one")
        seen.add(where)
        if port == settings.port and is_loopback(host) and not _is_other(host, settings.host):
            raise SettingsError(
                f"{label}: {url} is the daemon's own address; give the replica's, or another --port"
            )
    if followed:
        return  # how many there will be is not known yet
    if isinstance(settings.min_replicas, int) and settings.min_replicas > len(settings.replicas):
        raise SettingsError(
            f"{labels['min_replicas']}: {settings.min_replicas} is more than the "
            f"{len(settings.replicas)} configured; give fewer, or all"
        )


def _is_other(host: str, own_host: str) -> bool:
    """Whether two loopback addresses are surely different: 127.0.0.2 is not 127.0.0.1."""
    if not (_is_address(host) and _is_address(own_host)):
        return False
    own = ipaddress.ip_address(own_host)
    return not own.is_unspecified and ipaddress.ip_address(host) != own


def _check_exposure(settings: Settings, labels: Mapping[str, str]) -> None:
    if settings.token_env and settings.token_file:
        raise SettingsError(
            f"{labels['token_file']}: there is {labels['token_env']} too; keep one of them"
        )
    if not is_loopback(settings.host) and not settings.api_key_env and not settings.insecure:
        raise SettingsError(
            f"{labels['host']}: {settings.host} can be reached from other machines; "
            "give --api-key-env NAME, or --insecure if that is meant"
        )


# --- secrets ------------------------------------------------------------------------------------

PUSH_KEY: Final = "ROLLMUX_PUSH_KEY"
"""The variable that the replicas' push endpoints read (``deploy/replica/rollmux_push.py``)."""
SECRET_NAMES: Final = ("token_env", "api_key_env", "admin_key_env", "push_key_env")
"""Fields whose value is the name of an environment variable that holds a secret."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """What the environment and the token file hold. No ``repr`` shows a secret."""

    token: str | None = field(default=None, repr=False)
    """For replicas, from ``token_env`` or, as it is now, ``token_file``."""
    hf_token: str | None = field(default=None, repr=False)
    """``HF_TOKEN``; for ``https://*.hf.jobs`` only, and only without the other."""
    hub_token: str | None = field(default=None, repr=False)
    """``HF_TOKEN``, for the Hub itself."""
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    push_key: str | None = field(default=None, repr=False)
    """Of the replicas' push endpoints."""


def read_secrets(settings: Settings, environ: Mapping[str, str]) -> Secrets:
    """Look up the secrets that the settings name.

    :raises SettingsError: a named one is missing or cannot stand in a header; it is not shown.
    """
    token = _from_variable("--token-env", settings.token_env, environ)
    if settings.token_file is not None:
        try:
            token = read_token_file(settings.token_file)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--token-file: {settings.token_file}: {error}") from None
    hf_token = environ.get("HF_TOKEN", "").strip()
    return Secrets(
        token=token,
        # Nobody chose HF_TOKEN for us, so one that is unfit is left alone instead of refused.
        hf_token=hf_token if token is None and _fits_header(hf_token) else None,
        hub_token=hf_token if _fits_header(hf_token) else None,
        api_key=_from_variable("--api-key-env", settings.api_key_env, environ),
        admin_key=_from_variable("--admin-key-env", settings.admin_key_env, environ),
        push_key=_from_variable("--push-key-env", _push_key(settings, environ), environ),
    )


def read_token_file(path: str) -> str:
    """The token in a file, without white space around it.

    :raises OSError: the file cannot be read.
    :raises ValueError: it is empty or cannot stand in a header; the message does not show it.
    """
    try:
        token = Path(path).read_text("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not _fits_header(token):
        raise ValueError("is empty or holds what a header cannot; put just the token there")
    return token


def _push_key(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """The variable with the push key: the one that is named, else the usual one where it is set."""
    usual = PUSH_KEY if environ.get(PUSH_KEY, "").strip() else None
    return settings.push_key_env or usual


def _from_variable(flag: str, variable: str | None, environ: Mapping[str, str]) -> str | None:
    if variable is None:
        return None
    secret = environ.get(variable, "").strip()
    if _fits_header(secret):
        return secret
    # A token pasted in the place of a name must not end in a log, so only usual names are shown.
    shown = variable if re.fullmatch(r"[A-Z][A-Z0-9_]*", variable) else "of that name"
    if secret:
        raise SettingsError(f"{flag}: the variable {shown} holds what a header cannot; check it")
    raise SettingsError(
        f"{flag}: the environment has no variable {shown}, or it is empty; "
        "set it, and give its name, not the secret itself"
    )


def _fits_header(secret: str) -> bool:
    return bool(re.fullmatch(r"[\x21-\x7e]+", secret))

"""The plan of a run: which Jobs it consists of and what each is started with. No IO."""

from __future__ import annotations

import base64
import json
import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

IMAGE: Final = "vllm/vllm-openai:v0.27.1"
PORT: Final = 8000
"""Where vLLM listens in its Job."""
ALIAS: Final = "vllm"
"""All replicas of a network group claim it, so the name resolves to every one of them."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` may be (vLLM 0.27.1, vllm/config/lora.py)."""
CPU_LORAS_PER_SLOT: Final = 4
"""An adapter that fell out of vLLM's memory is read back from its files inside the engine, which
dies if they are gone: memory is cheaper than that."""
KEEP_ALIVE_S: Final = 75
"""vLLM's idle connections must outlive the daemon's, which gives its own up after 4 s
(proxy/upstream.py, ``IDLE_S``), and those of what is in between."""
MARGIN_S: Final = 900
"""What a replica's Job may run longer than the trainer's, beside the waits at the start."""
PUSH_KEY: Final = "ROLLMUX_PUSH_KEY"
PLAN: Final = "RUN_PLAN"
"""Environment variable of the trainer Job. Not ROLLMUX_…: the daemon refuses names it does not
know."""

TRAINER: Final = "trainer"
REPLICA: Final = "replica"

_RUN: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,36}[a-z0-9])?")
"""A network group has at most 46 characters; ours is the run's name, a dash and seven more."""


class PlanError(ValueError):
    """The operator's to mend: one line that names the option and the fix."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A bucket in a Job."""

    bucket: str
    mount: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One Job, as the Hub's API wants it. ``timeout_s`` is always set: the Hub's own is 30 min."""

    name: str
    image: str
    command: tuple[str, ...]
    flavor: str
    timeout_s: int
    labels: Mapping[str, str]
    env: Mapping[str, str]
    secrets: tuple[str, ...]
    """Names; the values come from elsewhere and are never printed."""
    volumes: tuple[Volume, ...]
    expose: tuple[int, ...] = ()
    network_group: str | None = None
    network_aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. Everything but secrets; the trainer Job gets it too, to replace lost replicas."""

    run: str
    """The value of the label ``run`` of every Job."""
    launch: str
    """Hex that is new each time: of two launches under one name only one may be cleaned up."""
    namespace: str
    model: str
    command: tuple[str, ...] = ()
    replicas: int = 2
    transport: str = "expose"
    replica_flavor: str = "h200"
    trainer_flavor: str = "h200"
    image: str = IMAGE
    trainer_image: str = IMAGE
    bucket: str = ""
    mount: str = "/lora"
    max_staleness: int = 4
    max_lora_rank: int = 32
    max_model_len: int = 8192
    tensor_parallel_size: int = 1
    vllm_args: tuple[str, ...] = ()
    replica_env: Mapping[str, str] = field(default_factory=dict)
    replica_secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    run_args: tuple[str, ...] = ()
    install: str = ""
    """What the trainer Job installs rollmux from; ``none`` if its image has it."""
    push_module: str = ""
    """Text of the replicas' push endpoint; empty: adapters travel through the bucket."""
    trainer_timeout_s: int = 6 * 3600
    start_timeout_s: int = 1800
    keep_replicas: bool = False
    max_replacements: int = 3
    flush_path: str = ""
    poll_s: float = 5.0
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        """:raises PlanError: a value that the Hub or vLLM would refuse later, at a price."""
        if not _RUN.fullmatch(self.run):
            raise PlanError(
                f"--run {self.run!r}: give up to 38 lower-case letters, digits and dashes, "
                "without a dash at an end"
            )
        if not self.mount.startswith("/") or self.mount.rstrip("/") == "":
            raise PlanError(f"--mount {self.mount!r}: give a folder such as /lora")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.bucket):
            raise PlanError(f"--bucket {self.bucket!r}: write it like {self.namespace}/NAME")
        if self.flush_path and not f"{self.flush_path}/".startswith(f"{self.mount}/"):
            raise PlanError(
                f"--flush-path {self.flush_path}: it is not in the bucket, which is mounted at "
                f"{self.mount}"
            )
        self.vllm_rank()

    def vllm_rank(self) -> int:
        """The smallest rank that vLLM accepts and that is enough."""
        for rank in RANKS:
            if rank >= self.max_lora_rank > 0:
                return rank
        raise PlanError(f"--max-lora-rank {self.max_lora_rank}: vLLM takes 1 to {RANKS[-1]}")

    @property
    def labels(self) -> dict[str, str]:
        """What every Job of this launch carries."""
        return {"run": self.run, "launch": self.launch}

    @property
    def network_group(self) -> str | None:
        """New for each launch: an alias is held as long as its group lives."""
        return f"{self.run}-{self.launch[:7]}" if self.transport == "network-group" else None

    @property
    def replica_timeout_s(self) -> int:
        """A replica waits for the others and for the trainer's Job before the trainer's time."""
        return self.trainer_timeout_s + 2 * self.start_timeout_s + MARGIN_S

    def replica(self, index: int) -> JobSpec:
        """The Job of one replica. The bucket is read-only there."""
        grouped = self.network_group is not None
        return JobSpec(
            name=f"{self.run}-replica-{index}",
            image=self.image,
            command=("sh", "-c", self._serve_line()),
            flavor=self.replica_flavor,
            timeout_s=self.replica_timeout_s,
            labels=self.labels | {"role": REPLICA, "replica": str(index)},
            env={
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
                **({"PUSH_MODULE": packed(self.push_module)} if self.push_module else {}),
                **self.replica_env,
            },
            secrets=self._replica_secrets(),
            volumes=(Volume(self.bucket, self.mount, read_only=True),),
            expose=() if grouped else (PORT,),
            network_group=self.network_group,
            network_aliases=(ALIAS,) if grouped else (),
        )

    def trainer(self) -> JobSpec:
        """The Job that runs ``rollmux run`` and COMMAND. It may write to the bucket."""
        return JobSpec(
            name=f"{self.run}-trainer",
            image=self.trainer_image,
            command=("sh", "-c", self._trainer_line()),
            flavor=self.trainer_flavor,
            timeout_s=self.trainer_timeout_s,
            labels=self.labels | {"role": TRAINER},
            env={**self.env, PLAN: self.to_json()},
            # The replicas' secrets too: it starts replicas in the place of lost ones.
            secrets=tuple(dict.fromkeys(("HF_TOKEN", *self.secrets, *self._replica_secrets()))),
            volumes=(Volume(self.bucket, self.mount, read_only=False),),
            network_group=self.network_group,
            network_aliases=("trainer",) if self.network_group else (),
        )

    def jobs(self) -> tuple[JobSpec, ...]:
        return (*(self.replica(index) for index in range(self.replicas)), self.trainer())

    def _replica_secrets(self) -> tuple[str, ...]:
        return (*((PUSH_KEY,) if self.push_module else ()), *self.replica_secrets)

    def _serve_line(self) -> str:
        slots = self.max_staleness + 2
        words = [
            *("vllm", "serve", self.model, "--host", "0.0.0.0", "--port", str(PORT)),
            *("--enable-lora", "--max-loras", str(slots)),
            *("--max-cpu-loras", str(CPU_LORAS_PER_SLOT * slots)),
            *("--max-lora-rank", str(self.vllm_rank())),
            *("--max-model-len", str(self.max_model_len)),
            # What the trainer's loss needs, and no sampling defaults from the model's own files.
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        ]
        if self.tensor_parallel_size > 1:
            words += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        before = ""
        if self.push_module:
            words += ["--middleware", "rollmux_push.AdapterPush"]
            # The stock image knows nothing of us: the module comes in a variable.
            before = (
                "set -e; d=$(mktemp -d); python3 -c 'import base64, os, zlib; "
                'print(zlib.decompress(base64.b64decode(os.environ["PUSH_MODULE"])).decode(), '
                'end="")\' > $d/rollmux_push.py; unset PUSH_MODULE; '
                'export PYTHONPATH="$d${PYTHONPATH:+:$PYTHONPATH}"; '
            )
        return f"{before}exec {shlex.join([*words, *self.vllm_args])}"

    def _trainer_line(self) -> str:
        install = ""
        if self.install != "none":
            # Apart from the trainer's packages; the image of vLLM has uv, others may not.
            install = (
                "set -e; command -v uv >/dev/null || python3 -m pip install --quiet uv; "
                f"uv tool install --quiet {shlex.quote(self.install)}; "
                'export PATH="$PATH:$(uv tool dir --bin)"; '
            )
        command = shlex.join(self.command)
        return f"{install}exec rollmux deploy hf trainer -- {command}"

    # For the trainer Job

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"push_module": packed(self.push_module)})

    @staticmethod
    def from_json(text: str) -> Plan:
        """:raises PlanError: it was not made by ``to_json`` of this version."""
        try:
            values: dict[str, Any] = json.loads(text)
            values["push_module"] = unpacked(values["push_module"])
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            return Plan(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{PLAN} holds no plan of this version ({error})") from error


def packed(text: str) -> str:
    """Short, and without a character that an environment variable could lose."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode() if text else ""


def unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode() if text else ""

"""Every command that README and docs show: run here, or where it needs more than this, checked.

``RULES`` says for each program what is done with it. What needs a GPU, a cluster, a token or the
network is checked against the program's own parser or options, and its rule says ``needs``; a
program without a rule fails. Simulated replicas stand in for ``gpu1`` and ``gpu2``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from proxy.__main__ import parsers
from proxy.settings import load, options
from tests.docs.commands import LANGUAGES, ROOT, Block, Command, blocks, commands, pages

log = logging.getLogger(__name__)

DEADLINE_S = 50.0
"""For one command; the machine may be busy."""
PYTHON = sys.executable
ADMIN_KEY = "an-admin-key"
VLLM_OPTIONS = frozenset((Path(__file__).parent / "vllm_serve_options.txt").read_text().split())
QUIET = {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
"""For the help of hf: whole lines, and no look for a newer version."""
TRAINER = """
import os, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
assert opener.open(os.environ["ROLLMUX_URL"] + "/health", timeout=30).status == 200
"""
"""Stands in for a reader's train.py."""
TRACE = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n' * 2
"""Stands in for a reader's recording."""

ALL = [block for page in pages() for block in blocks(page)]


def shell_blocks() -> list[Block]:
    """Those that say they are shell; of those that say nothing, the ones that begin like it."""
    found = [block for block in ALL if block.language in LANGUAGES]
    for block in ALL:
        if not block.language:
            first = block.text.strip().split(maxsplit=1)[:1]
            if first and (first[0] in RULES or re.match(r"[A-Z_]+=\S", first[0])):
                found.append(block)
    return found


# --- a fleet to run them against ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """A daemon with two simulated replicas, two more that it does not know, and a folder.

    The two more are for the daemons that commands start: two of them must not share a replica.
    """

    replicas: tuple[str, ...]
    daemon: str
    folder: Path

    def placed(self, word: str, first: int = 2) -> str:
        """A word of a command with the addresses that stand on this stage."""
        one, two = self.replicas[first : first + 2]
        for host, url in (("gpu1:8000", one), ("gpu2:8000", two)):
            word = word.replace(f"http://{host}", url)
        for port, url in (("8001", one), ("8002", two)):
            word = word.replace(f"http://127.0.0.1:{port}", url)
        for host in ("127.0.0.1:8000", "localhost:8000"):
            word = word.replace(f"http://{host}", self.daemon)
        return word.replace("$ADMIN_KEY", ADMIN_KEY)

    def run(
        self, words: Sequence[str], environ: dict[str, str] | None = None, *, fine: tuple[int, ...]
    ) -> str:
        """Run to the end; what it said. ``fine`` are the exit codes that are."""
        done = subprocess.run(
            list(words),
            cwd=self.folder,
            env=clean(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode in fine, f"exit code {done.returncode}:\n{done.stdout}"
        return done.stdout


def clean(more: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which this checkout is what gets run, and no setting is left over."""
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("ROLLMUX_", "PROXY_", "HF_"))
    }
    environ.update(more or {})
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    environ["ADMIN_KEY"] = ADMIN_KEY
    return environ


@contextlib.contextmanager
def background(
    words: Sequence[str], wanted: str, environ: dict[str, str], folder: Path
) -> Iterator[str]:
    """A program that runs until it is told to stop; yields the line that has ``wanted``."""
    # A file, because nobody reads on from a pipe, and a full one would make it wait.
    with (
        tempfile.NamedTemporaryFile(dir=folder, suffix=".log") as output,
        subprocess.Popen(
            list(words), cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        said = Path(output.name)
        try:
            yield _line_with(process, said, wanted)
        except BaseException as failure:
            failure.add_note(said.read_text(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
    assert process.returncode in (0, -15), process.returncode


def _line_with(process: subprocess.Popen[bytes], said: Path, wanted: str) -> str:
    by_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < by_s and process.poll() is None:
        for line in said.read_text(errors="replace").splitlines(True):
            if wanted in line and line.endswith("\n"):
                return line
        time.sleep(0.02)
    pytest.fail(f"no line with {wanted!r}")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    (folder / "train.py").write_text(TRAINER)
    (folder / "docs").symlink_to(ROOT / "docs")
    replica = [PYTHON, "-m", "benchmarks.replica", "--port", "0", "--vocab-size", "32000"]
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(4):
            line = stack.enter_context(background(replica, "http://", clean(), folder))
            urls.append(re.findall(r"http://[\w.:]+", line)[0])
        words = [PYTHON, "-m", "proxy", "serve", "--port", "0", "--admin-key-env", "ADMIN_KEY"]
        words += [part for url in urls[:2] for part in ("--replica", url)]
        line = stack.enter_context(background(words, "serves http://", clean(), folder))
        daemon = re.findall(r"http://[\w.:]+", line)[0]
        until_whole(daemon)
        yield Stage(tuple(urls), daemon, folder)


def until_whole(daemon: str) -> None:
    """Until two replicas are ready and none is leaving."""
    by_s, states = time.monotonic() + DEADLINE_S, []
    with httpx.Client(base_url=daemon, trust_env=False, timeout=10) as client:
        while time.monotonic() < by_s:
            found = client.get("/proxy/status").json()["replicas"]
            states = [replica["state"] for replica in found]
            if states and set(states) == {"ready"}:
                return
            time.sleep(0.05)
    pytest.fail(f"the fleet did not settle: {states}")


# --- what is done with each program -------------------------------------------------------------

RAN = "run"
Rule = Callable[[Command, Stage], str]
"""Returns ``RAN``, or ``needs …: what was checked instead``."""


def rollmux(command: Command, stage: Stage) -> str:
    words = [stage.placed(word) for word in command.words[1:]]
    environ = {k: stage.placed(v) for k, v in command.environ.items()}
    if "PYTHONPATH" in environ:
        environ["PYTHONPATH"] = str(ROOT / environ["PYTHONPATH"])
    ours = words[: words.index("--")] if "--" in words else words
    binary = [PYTHON, "-m", "proxy"]
    if not {"--help", "--version"} & set(ours):
        parser, _ = parsers()
        if refused(command):
            parser = None
        if parser is not None:
            known, extra = parser.parse_known_args(ours)
            assert not extra, f"options that rollmux does not know: {extra}"
            if known.command in ("serve", "run"):
                fields = {info.field for info in options()} | {"config"}
                given = {k: v for k, v in vars(known).items() if k in fields}
                load(given, {**environ, **os_path()})
    match ours[0]:
        case "routers" | "--help" | "--version":
            stage.run([*binary, *words], environ, fine=(0,))
            return RAN
        case "demo":
            demo(stage, words[1:])
            return RAN
        case "serve" if refused(command):
            said = stage.run([*binary, *words], environ, fine=(2,))
            assert said.strip() in page_text(command), said
            return RAN
        case "serve":
            if "sticky" in words:
                return "needs a package that is installed: parsed; see test_plugin_example.py"
            environ.setdefault("PYTHONPATH", "")
            with background(
                [*binary, *words, "--port", "0"], "serves http://", stage_env(environ), stage.folder
            ) as line:
                until_whole(re.findall(r"http://[\w.:]+", line)[0])
            return RAN
        case "run":
            if "train.py" not in words or foreign(ours):
                return "needs the reader's own fleet or trainer: parsed"
            cut = words.index("--")
            trainer = [PYTHON if word == "python" else word for word in words[cut + 1 :]]
            said = stage.run(
                [*binary, *words[:cut], "--port", "0", "--take-over", "--", *trainer],
                environ,
                fine=(0,),
            )
            assert "the trainer exited with code 0" in said
            return RAN
        case "doctor":
            if foreign(ours) or {"--beacon", "--hold-reply-s"} & set(words):
                return "needs the reader's own fleet: parsed"
            said = stage.run([*binary, *words], environ, fine=(0, 1))
            assert "OK" in said, said
            assert "FAIL reachable" not in said
            return RAN
        case "replay":
            (stage.folder / words[1]).write_text(TRACE)
            stage.run([*binary, *words], environ, fine=(0,))
            return RAN
        case "deploy":
            return "needs a token of the Hub: parsed"
        case _:
            pytest.fail(f"{command}: no rule for this command of rollmux")


def demo(stage: Stage, words: Sequence[str]) -> None:
    """Shorter than it is shown. On a busy machine that may be too short for a rollout: exit 1."""
    words = [PYTHON, "-m", "proxy", "demo", *words, "--seconds", "6"]
    said = stage.run(words, fine=(0, 1))
    assert re.search(r"failed calls +0\n", said) or '"failures": []' in said, said


def refused(command: Command) -> bool:
    """A console block shows what was said; here it shows a refusal."""
    return "unknown option" in page_text(command) and "--load-timeout" in command.words


def page_text(command: Command) -> str:
    return (ROOT / command.page).read_text("utf-8")


def stage_env(environ: dict[str, str]) -> dict[str, str]:
    return clean({k: v for k, v in environ.items() if v})


def os_path() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", "")}


def foreign(words: Sequence[str]) -> bool:
    """Whether a command names hosts or files that only its reader has."""
    urls = [word for word in words if re.match(r"https?://(?!127\.0\.0\.1)", word)]
    sources = {"--replicas-dns", "--replicas-file", "--replicas-hf-label", "--token-file"}
    return bool(urls) or bool(sources & set(words)) or not any("http" in word for word in words)


def curl(command: Command, stage: Stage) -> str:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    words = [stage.placed(word, 0) for word in command.words[1:]]
    if not any(word.startswith(stage.daemon) for word in words):
        return elsewhere(words)
    with httpx.Client(
        base_url=stage.daemon,
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
        trust_env=False,
        timeout=10,
    ) as admin:
        # A replica that leaves and the one that comes are two commands: each does the other's part
        # here, so that it can be run alone and the next one finds the stage as it was.
        url = stage.replicas[1]
        removes, adds = "DELETE" in words, words[-1].endswith("/proxy/replicas") and "-d" in words
        if removes:
            words[-1] = words[-1].replace("/r1?", f"/{id_of(admin, url)}?")
        if adds:
            admin.delete(f"/proxy/replicas/{id_of(admin, url)}").raise_for_status()
            until_gone(admin, url)
        stage.run([program, "-sS", "--fail", *words], fine=(0,))
        if removes:
            until_gone(admin, url)
            admin.post("/proxy/replicas", json={"url": url}).raise_for_status()
    until_whole(stage.daemon)
    return RAN


def id_of(client: httpx.Client, url: str) -> str | None:
    """None: the daemon does not list it."""
    replicas = client.get("/proxy/status").json()["replicas"]
    return next((r["id"] for r in replicas if r["url"] == url), None)


def until_gone(client: httpx.Client, url: str) -> None:
    by_s = time.monotonic() + DEADLINE_S
    while id_of(client, url) is not None:
        assert time.monotonic() < by_s, f"{url} does not leave"
        time.sleep(0.05)


def elsewhere(words: Sequence[str]) -> str:
    assert any("://" in word or word.isupper() for word in words), "no URL"
    return "needs the reader's own server: it names one"


def python(command: Command, stage: Stage) -> str:
    words = command.words[1:]
    if words[:1] == ("-m",):
        module = words[1]
        if module == "benchmarks.replica":
            arguments = [w for w in words if not re.fullmatch(r"80\d\d", w) and w != "--port"]
            with background([PYTHON, *arguments, "--port", "0"], "http://", clean(), stage.folder):
                return RAN
        if module in ("venv", "pip"):
            return "needs the network: it is Python's own module"
        assert importlib.util.find_spec(module), f"there is no module {module}"
        said = stage.run([PYTHON, "-m", module, "--help"], fine=(0,))
        flags = [word for word in words[2:] if word.startswith("--")]
        assert all(flag.partition("=")[0] in said for flag in flags), said
        return "takes minutes: parsed by its own --help"
    if words[:1] == ("-c",):
        compile(words[1], str(command), "exec")
        return "needs the reader's own environment: it compiles"
    if words and words[0] == "train.py":
        return "needs the reader's own trainer"
    return files(command, stage)


def make(command: Command, stage: Stage) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    said = stage.run(["make", "-C", str(ROOT), "-n", *command.words[1:]], fine=(0,))
    if command.words[1] == "demo":
        assert "-m proxy demo" in said
        demo(stage, [])
        return RAN
    return "takes minutes: make -n"


def vllm(command: Command, _: Stage) -> str:
    assert command.words[1] == "serve", command
    flags = [w.partition("=")[0] for w in command.words if w.startswith("--")]
    unknown = [flag for flag in flags if flag not in VLLM_OPTIONS]
    assert not unknown, f"vllm serve 0.27.1 has no {unknown}"
    return "needs a GPU: options are those of vllm serve 0.27.1"


def installer(command: Command, stage: Stage) -> str:
    paths = [w for w in command.words[1:] if w.startswith(".")]
    for path in paths:
        assert (ROOT / path.partition("[")[0] / "pyproject.toml").is_file(), path
    if command.program in ("pip", "pip3"):
        said = stage.run([PYTHON, "-m", "pip", command.words[1], "--help"], fine=(0,))
    elif shutil.which("uv"):
        verbs = [w for w in command.words[1:3] if not w.startswith(("-", "."))]
        said = stage.run(["uv", *verbs, "--help"], fine=(0,))
    else:
        return "needs the network and uv: its paths are here"
    flags = [w.partition("=")[0] for w in command.words if w.startswith("--")]
    assert all(flag in said for flag in flags), f"not among the options: {flags}"
    return "needs the network: its paths are here, its options exist"


def files(command: Command, _: Stage) -> str:
    """Nothing is run, but what the words name in this repository has to be there."""
    for word in command.words:
        path = word.partition("=")[2] or word
        inside = re.match(r"(\./)?(deploy|docs|tests|benchmarks|proxy|trainer_entry)/", path)
        if inside or (ROOT / path).suffix in (".sbatch", ".service"):
            assert list(ROOT.glob(path.rstrip("/"))), f"{path} is not in this repository"
    if "rollmux" in command.words[1:]:  # run in a container, say
        words = command.words[command.words.index("rollmux") + 1 :]
        if words and words[0] in parsers()[1]:
            _, extra = parsers()[0].parse_known_args(words)
            assert not extra, f"options that rollmux does not know: {extra}"
    return "needs a cluster, a container engine or another host: the files named are here"


def hub(command: Command, stage: Stage) -> str:
    program = shutil.which("hf", path=str(Path(PYTHON).parent)) or shutil.which("hf")
    if program is None:
        pytest.skip("hf is not installed")
    verbs = [w for w in command.words[1:3] if re.fullmatch(r"[a-z-]+", w)]
    said = stage.run([program, *verbs, "--help"], QUIET, fine=(0,))
    flags = [w.partition("=")[0] for w in command.words if w.startswith("--")]
    assert all(flag in said for flag in flags), f"not among the options: {flags}"
    return "needs a token of the Hub: its options are those of hf --help"


def script(command: Command, stage: Stage) -> str:
    path = next(w for w in command.words if not w.startswith("-") and w not in ("bash", "sh"))
    if (ROOT / path).is_file():
        stage.run(["bash", "-n", str(ROOT / path)], fine=(0,))
        return "needs a cluster or a token: bash -n"
    return files(command, stage)


def environment(command: Command, _: Stage) -> str:
    """Variables with our prefix have to be settings, or known to be somebody's."""
    pairs = [word.split("=", 1) for word in command.words[1:] if "=" in word]
    environ = {**command.environ, **dict(pairs)}
    ours = {k: v for k, v in environ.items() if k.startswith("ROLLMUX_")}
    known = {info.env for info in options()} | {"ROLLMUX_PUSH_KEY"}
    for name in ours:
        beyond = name.startswith(("ROLLMUX_PUSH_", "ROLLMUX_E2E_"))
        assert name in known or beyond, f"{name} is no setting"
    return RAN


def shell(command: Command, _: Stage) -> str:
    return RAN


def venv(command: Command, _: Stage) -> str:
    assert command.words[1] == ".venv/bin/activate", command
    return "needs the reader's shell: make has made it"


CLUSTER = (
    "kubectl", "kustomize", "kubeconform", "helm", "sbatch", "squeue", "scancel", "srun", "salloc",
    "docker", "buildah", "podman", "scp", "ssh", "rsync", "git",
    "promtool", "prometheus", "grafana-server", "amtool", "systemctl", "journalctl", "sinfo",
)  # fmt: skip
RULES: dict[str, Rule] = {
    "rollmux": rollmux,
    "curl": curl,
    "python": python,
    "python3": python,
    ".venv/bin/python": python,
    "make": make,
    "vllm": vllm,
    "hf": hub,
    "uv": installer,
    "pip": installer,
    "bash": script,
    "sh": script,
    "export": environment,
    ".": venv,
    "source": venv,
    **dict.fromkeys(CLUSTER, files),
    **dict.fromkeys(
        ("cd", "mkdir", "cp", "mv", "rm", "ls", "cat", "echo", "kill", "jq", "grep", "tail", "wait",
         "openssl", "sleep", "head", "sed", "watch", "less", "printf", "umask", "set", "chmod"),
        shell,
    ),
}  # fmt: skip


def every_command() -> list[Command]:
    return [command for block in shell_blocks() for command in commands(block)]


EVERY = every_command()
DONE: dict[tuple[object, ...], str] = {}


@pytest.mark.parametrize("command", EVERY, ids=[f"{c.page}:{c.line}" for c in EVERY])
def test_command_of_a_page_works(command: Command, stage: Stage) -> None:
    """What was done with each: ``-o log_cli=true --log-cli-level=INFO``."""
    key = (command.words, *command.environ.items())
    if key not in DONE:  # pages repeat the usual ones
        program = command.program
        rule = RULES.get(program)
        if rule is None and (program.startswith("./") or program.startswith("deploy/")):
            rule = script
        assert rule is not None, f"{command}: no rule for {program!r}; add one to RULES"
        environment(command, stage)
        DONE[key] = rule(command, stage)
    log.info("%s -> %s", command, DONE[key])
    assert DONE[key] == RAN or re.match(r"(needs|takes) .+: .+|needs the reader's", DONE[key])


# --- the other blocks ---------------------------------------------------------------------------

TYPED = [block for block in ALL if block.language in ("python", "json", "toml")]


@pytest.mark.parametrize("block", TYPED, ids=[f"{b.page}:{b.line}" for b in TYPED])
def test_block_of_a_page_is_what_it_says(block: Block) -> None:
    match block.language:
        case "python":
            compile(block.text, f"{block.page}:{block.line}", "exec")
        case "json":
            json.loads(block.text)
        case _:
            found = tomllib.loads(block.text)
            if "replicas" in found:
                load(found, {})


LINKS = [
    (page, target)
    for page in pages()
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))
    if not re.match(r"https?://|mailto:", target)
]


@pytest.mark.parametrize(("page", "target"), LINKS, ids=[f"{p.name}->{t}" for p, t in LINKS])
def test_link_leads_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    assert found.exists(), f"{page.relative_to(ROOT)} links to {target}"
    if anchor:
        heads = re.findall(r"^#+ (.+)$", found.read_text("utf-8"), re.MULTILINE)
        assert anchor in {_anchor(head) for head in heads}, f"{target}: no such heading"


def _anchor(head: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")

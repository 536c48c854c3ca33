"""The proxies that are compared, and how each is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.daemon import environment
from benchmarks.overhead import wire
from benchmarks.overhead.process import free_port, started

ROUTER_VERSION = "0.1.17"
START_S = 60.0
NAMES = ("direct", "aiohttp", "vllm-router", "rollmux")


class NotInstalled(Exception):
    """The text says what is missing."""


class DidNotStart(Exception):
    """The text has the proxy's last lines."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that runs; ``pid`` is None for the upstreams themselves."""

    name: str
    urls: Sequence[str]
    pid: int | None
    ca_file: str = ""
    """What its clients have to trust; only the upstreams themselves speak TLS here."""


@contextlib.contextmanager
def run(
    name: str, upstreams: Sequence[str], *, core: int, ca_file: str, router: Path | None, log: Path
) -> Iterator[Proxy]:
    """The proxy ``name`` before these URLs, ready. Raises NotInstalled, DidNotStart."""
    if name == "direct":
        yield Proxy(name, upstreams, None, ca_file)
        return
    port = free_port()
    command = _COMMANDS[name](port, upstreams, ca_file, router)
    environ = environment({"SSL_CERT_FILE": ca_file} if ca_file and name != "rollmux" else {})
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as output,
        started(command, core, environ=environ, stdout=output, stderr=output) as child,
    ):
        _until_ready(name, url, child, log)
        yield Proxy(name, (url,), child.pid)


def _until_ready(name: str, url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Until it says it is healthy and carries a generation."""
    deadline_s = time.monotonic() + START_S
    body = {"model": "m", "prompt": [1], "seed": wire.NUMBERS}
    with httpx.Client(trust_env=False, timeout=10) as client:
        while time.monotonic() < deadline_s and child.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (
                    client.get(f"{url}/health").status_code == 200
                    and client.post(f"{url}/v1/completions", json=body).status_code == 200
                ):
                    return
            time.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()[-5:]
    raise DidNotStart("\n  ".join([f"{name} did not come up; its last lines:", *lines]))


def _aiohttp(port: int, upstreams: Sequence[str], ca_file: str, _: Path | None) -> list[str]:
    if importlib.util.find_spec("aiohttp") is None:
        raise NotInstalled("aiohttp: it is among the development dependencies")
    module = "benchmarks.overhead.aiohttp_proxy"
    return [sys.executable, "-m", module, str(port), ca_file, *upstreams]


def _router(port: int, upstreams: Sequence[str], _: str, router: Path | None) -> list[str]:
    if router is None:
        raise NotInstalled(f"vllm-router {ROUTER_VERSION}")
    return router_command(router, port, upstreams)


def router_command(router: Path, port: int, upstreams: Sequence[str]) -> list[str]:
    """vllm-router with its cache_aware policy and thresholds."""
    return [
        str(router), "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
        "--worker-urls", *upstreams, "--prometheus-port", str(free_port()), "--log-level", "error",
        # Its defaults refuse what is in flight beyond them.
        "--max-concurrent-requests", "20000", "--queue-size", "20000",
    ]  # fmt: skip


def _rollmux(port: int, upstreams: Sequence[str], ca_file: str, _: Path | None) -> list[str]:
    command = [sys.executable, "-m", "proxy", "serve", "--port", str(port), "--drain-s", "1"]
    for upstream in upstreams:
        command += ["--replica", upstream]
    return [*command, "--ca-file", ca_file] if ca_file else command


_COMMANDS = {"aiohttp": _aiohttp, "vllm-router": _router, "rollmux": _rollmux}


def find_router(given: Path | None) -> Path | None:
    """vllm-router's command: ``given``, or one in an environment outside the checkout.

    That environment is made if it is not there; None where it cannot be.
    """
    if given is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "rollmux" / f"vllm-router-{ROUTER_VERSION}"
    command = place / "bin" / "vllm-router"
    if command.is_file():
        return command
    print(f"making {place} with vllm-router {ROUTER_VERSION}", file=sys.stderr, flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        venv.create(place, with_pip=True)
        subprocess.run(
            [place / "bin" / "python", "-m", "pip", "install", "--quiet",
             f"vllm-router=={ROUTER_VERSION}"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=600,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as exc:
        said = getattr(exc, "stderr", None) or b""
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        print(f"vllm-router is not installed: {' '.join(last) or exc}", file=sys.stderr)
        return None
    return command if command.is_file() else None


def certificate(folder: Path) -> tuple[str, str]:
    """``(chain and key, authority)``, PEM files for 127.0.0.1, good for a day."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    pem = serialization.Encoding.PEM

    def signed(
        name: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey, *, ca: bool
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark CA")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([host]), False)
        return builder.sign(by, hashes.SHA256()).public_bytes(pem)

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    key = leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    authority, chain = folder / "ca.pem", folder / "server.pem"
    authority.write_bytes(signed("benchmark CA", root, root, ca=True))
    chain.write_bytes(signed("upstream", leaf, root, ca=False) + key)
    return str(chain), str(authority)

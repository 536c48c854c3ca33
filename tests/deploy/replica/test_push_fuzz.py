"""Whatever comes to a replica's push paths has a clear status, and the disk stays right.

``python -m tests.deploy.replica.test_push_fuzz 20000`` runs as many examples as it is told.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broadcast import adapter_dir
from deploy.replica.rollmux_push import BLOCK_BYTES
from tests.deploy.replica.push_client import Adapter, Replica, push_of, until

CODES = {
    400: {"bad_name", "bad_manifest", "too_many_files", "wrong_length", "wrong_digest"},
    401: {"wrong_key"},
    404: {"unknown", "not_found"},
    405: {"bad_method"},
    409: {"no_manifest", "listed", "busy"},
    411: {"no_length"},
    413: {"too_large"},
    507: {"no_room"},
}
ROOM = 1 << 20
ADAPTERS = [
    Adapter({"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 5000}, "a"),
    Adapter({"adapter_config.json": b"{}", "empty": b""}, "a"),
    Adapter({"b": b"1" * 400_000, "c": b"2" * 300_000}, "big"),
    Adapter({"b": b"3" * 600_000}, "trl-policy v7"),
]
BAD_NAMES = ["..", ".", "", "/etc/passwd", "../../outside", "a/b", "a\0b", ".lock", "a" * 300, "é"]

adapters = st.sampled_from(ADAPTERS)
directories = st.one_of(
    adapters.map(lambda a: a.name),
    st.sampled_from(BAD_NAMES).map(lambda name: f"{name}-{ADAPTERS[0].digest}"),
    st.sampled_from(BAD_NAMES),
    st.text(max_size=20),
)
file_names = st.one_of(
    st.sampled_from(sorted({name for a in ADAPTERS for name in a.files})),
    st.sampled_from(BAD_NAMES),
    st.text(max_size=10),
)
contents = st.one_of(
    st.integers(0, 3).map(lambda number: next(iter(ADAPTERS[number].files.values()))),
    st.binary(max_size=50),
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["digest", "files", "name", "bytes"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def manifests(draw: st.DrawFn) -> Any:
    """Mostly right, with a thing or two changed."""
    manifest = draw(adapters).manifest
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.sampled_from(["line", "lines", "top", "size", "all"])):
            case "line":
                key = draw(st.sampled_from(["name", "bytes", "digest"]))
                manifest["files"][0] = manifest["files"][0] | {key: draw(junk | file_names)}
            case "size":
                manifest["files"][0] = manifest["files"][0] | {"bytes": draw(st.integers())}
            case "lines":
                lines = st.sampled_from(manifest["files"])
                manifest["files"] = draw(st.lists(lines, min_size=1, max_size=70))
            case "top":
                manifest[draw(st.sampled_from(["digest", "files"]))] = draw(junk)
                return manifest
            case "all":
                return draw(junk)
    return manifest


calls = st.one_of(
    st.tuples(st.just("push"), adapters, st.booleans()),
    st.tuples(st.just("at once"), adapters, st.sampled_from(["", "first", "last", "longer"])),
    st.tuples(st.just("offer"), adapters),
    st.tuples(st.just("put"), adapters, st.integers(0, 1), st.booleans()),
    st.tuples(st.just("POST"), directories, manifests()),
    st.tuples(st.just("PUT"), directories, file_names, contents),
    st.tuples(st.just("abort"), adapters, st.integers(0, 1), st.floats(0, 1)),
    st.tuples(st.just("DELETE"), directories),
    st.tuples(st.just("list"), adapters),
    st.tuples(st.just("unlist"), adapters),
    st.tuples(st.just("wrong key"), adapters),
    st.tuples(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]), st.binary(max_size=40)),
)


def encoded(name: str) -> str:
    return quote(name, safe="", errors="surrogatepass")


class Run:
    """One history against a fresh middleware."""

    def __init__(self, replica: Replica, parent: Path) -> None:
        self.replica = replica
        self.parent = parent
        self.base = parent / "push"
        (parent / "outside").write_bytes(b"precious")
        replica.loras.clear()
        replica.push = push_of(self.base, ROLLMUX_PUSH_MAX_MB="1")

    def call(self, *call: Any, key: str | None = None) -> tuple[int, Any]:
        status, told = self.replica.call(*call, **({"key": key} if key else {}))
        if status >= 400:
            assert told in CODES[status], (call, status, told)
        else:
            assert status in (200, 202, 204), (call, status)
        return status, told

    def do(self, what: str, *args: Any) -> None:
        match what, *args:
            case "push", Adapter() as adapter, bool() as backwards:
                self.push(adapter, backwards)
            case "at once", Adapter() as adapter, str() as spoiled:
                body = adapter.at_once()
                if spoiled:
                    other = {"first": b"x" + body[1:], "last": body[:-1] + b"x"}
                    body = other.get(spoiled, body + b"x")
                status, told = self.call("PUT", f"/{quote(adapter.name)}", body)
                if status == 200:  # spoiled too, where what is spoiled was there before
                    assert adapter_dir.digest(Path(told["path"])) == adapter.digest
                assert status in (200, 507) or spoiled
            case "offer", Adapter() as adapter:
                assert self.call("POST", f"/{quote(adapter.name)}", adapter.manifest)[0] != 400
            case "put", Adapter() as adapter, int() as number, bool() as spoiled:
                name = list(adapter.files)[number % len(adapter.files)]
                data = adapter.files[name]
                data = data[::-1] + b"x" if spoiled else data
                status, told = self.call("PUT", f"/{quote(adapter.name)}/{name}", data)
                assert (status, told) != (204, None) or not spoiled
            case "POST", str() as directory, manifest:
                self.call("POST", f"/{encoded(directory)}", manifest)
            case "PUT", str() as directory, str() as name, bytes() as data:
                self.call("PUT", f"/{encoded(directory)}/{encoded(name)}", data)
            case "abort", Adapter() as adapter, int() as number, float() as share:
                name, data = list(adapter.files.items())[number % len(adapter.files)]
                target = f"/{quote(adapter.name)}/{name}"
                part = data[: int(len(data) * share * 0.99)]
                self.replica.sends_a_part(target, len(data) + 1, part).close()
            case "DELETE", str() as directory:
                listed = {request.lora_path for request in self.replica.loras.values()}
                status, _ = self.call("DELETE", f"/{encoded(directory)}")
                assert status != 204 or str(self.replica.root / directory) not in listed
            case "list", Adapter() as adapter:
                path = self.replica.root / adapter.name
                if path.exists():
                    self.replica.list_adapter(adapter.name, str(path))
            case "unlist", Adapter() as adapter:
                self.replica.loras.pop(adapter.name, None)
            case "wrong key", Adapter() as adapter:
                target = f"/{quote(adapter.name)}"
                assert self.call("DELETE", target, key="wrong") == (401, "wrong_key")
            case method, bytes() as raw:
                # As it is where HTTP lets it pass, else percent-encoded.
                target = quote(raw, safe="/.%") if len(raw) % 2 else quote(raw, safe="/.")
                self.call(method, f"/{target}")

    def push(self, adapter: Adapter, backwards: bool) -> None:
        target = f"/{quote(adapter.name)}"
        status, told = self.call("POST", target, adapter.manifest)
        if status == 202:
            assert set(told["missing"]) <= set(adapter.files)
            for name in sorted(told["missing"], reverse=backwards):
                status, told = self.call("PUT", f"{target}/{name}", adapter.files[name])
                assert status in (204, 507)
            status, told = self.call("POST", target, adapter.manifest)
        if status == 200:
            assert Path(told["path"]) == self.replica.root / adapter.name
            assert adapter_dir.digest(Path(told["path"])) == adapter.digest

    def check(self) -> None:
        """What holds between two calls."""
        store = self.replica.push.store
        until(lambda: not any(held.busy for held in store._held.values()))
        root = self.replica.root
        assert {p.name for p in self.parent.iterdir()} == {"push", "outside"}
        assert (self.parent / "outside").read_bytes() == b"precious"
        assert [p.name for p in self.base.iterdir()] == [root.name]
        assert list((root / ".uploads").iterdir()) == []
        assert list((root / ".trash").iterdir()) == []
        own = {".staging", ".uploads", ".trash", ".lock"}
        whole = {p.name for p in root.iterdir()} - own
        told = self.call("GET")[1]
        assert whole == {adapter["name"] for adapter in told["adapters"]}
        for name in whole:
            assert name.endswith(f"-{adapter_dir.digest(root / name)}")
        for request in self.replica.loras.values():
            assert Path(request.lora_path).is_dir()
        taken = sum(-(-p.stat().st_size // BLOCK_BYTES) for p in root.rglob("*") if p.is_file())
        assert taken * BLOCK_BYTES <= told["used_bytes"] <= ROOM


def play(replica: Replica, history: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = Run(replica, Path(directory))
        try:
            for call in history:
                run.do(*call)
                run.check()
        finally:
            replica.push.close()


histories = st.lists(calls, max_size=12)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=histories)
def test_nothing_leaves_the_folder_and_nothing_half_is_shown(
    served: Replica, history: list[tuple[Any, ...]]
) -> None:
    play(served, history)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(
            lambda name: name[0] != "." and not set("/\0") & set(name) and name.isprintable()
        ),
        st.binary(max_size=200),
        min_size=1,
        max_size=5,
    )
)
def test_digest_is_the_one_of_the_senders_folder(files: dict[str, bytes]) -> None:
    from deploy.replica.rollmux_push import File, _digest

    with tempfile.TemporaryDirectory() as directory:
        for name, data in files.items():
            Path(directory, name).write_bytes(data)
        manifest = {n: File(len(d), blake3(d).hexdigest()) for n, d in files.items()}
        digest = adapter_dir.digest(Path(directory))
        assert _digest(directory, manifest) == digest == Adapter(files).digest


if __name__ == "__main__":
    from tests.deploy.replica.push_client import serving

    server = Replica()
    with serving(server) as server.port:
        settings(
            max_examples=int(sys.argv[1]), deadline=None, suppress_health_check=[*HealthCheck]
        )(given(history=histories)(lambda history: play(server, history)))()

"""Adapters pushed to a replica, over real sockets: what is kept, what is refused, what is left."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.adapter import write_adapter
from broadcast import adapter_dir
from deploy.replica import rollmux_push
from deploy.replica.rollmux_push import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    STALE_S,
    AdapterPush,
    Store,
    Upload,
)
from tests.deploy.replica.push_client import (
    KEY,
    Adapter,
    Replica,
    of_bytes,
    push_of,
    serving,
    until,
)

ROOT = Path(__file__).parents[3]
MB = 1 << 20
SMALL = Adapter({"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"})


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def stage(replica: Replica, adapter: Adapter, *files: str) -> None:
    assert replica.call("POST", f"/{adapter.name}", adapter.manifest)[0] == 202
    for file in files:
        assert replica.call("PUT", f"/{adapter.name}/{file}", adapter.files[file])[0] == 204


def held(replica: Replica) -> list[str]:
    return [adapter["name"] for adapter in replica.call("GET")[1]["adapters"]]


# What is kept


def test_pushed_adapter_is_on_disk_byte_for_byte_under_the_digest_of_the_sender(
    replica: Replica, tmp_path: Path
) -> None:
    source = write_adapter(tmp_path / "trl-policy-v1")
    (source / "README.md").write_bytes(b"")
    (source / "größe").write_bytes(os.urandom(3 * MB + 17))
    adapter = Adapter({p.name: p.read_bytes() for p in source.iterdir()}, "trl-policy-v1")
    assert adapter.digest == adapter_dir.digest(source)
    path = Path(replica.push_all(adapter))
    assert path == replica.root / adapter.name
    assert {p.name: p.read_bytes() for p in path.iterdir()} == adapter.files
    assert adapter_dir.digest(path) == adapter.digest
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(replica.root.stat().st_mode) == 0o700
    assert replica.leftovers() == []


def test_an_adapter_sent_at_once_is_whole_with_one_call(replica: Replica) -> None:
    status, told = replica.call("PUT", f"/{SMALL.name}", SMALL.at_once())
    assert (status, told["published"]) == (200, True)
    folder = Path(told["path"])
    assert folder == replica.root / SMALL.name
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == SMALL.files
    assert replica.leftovers() == []
    assert replica.call("PUT", f"/{SMALL.name}", SMALL.at_once()) == (status, told)
    # One that was begun file by file is ended by it, and may be sent again by several at once.
    other = of_bytes(MB, "v2")
    stage(replica, other, next(iter(other.files)))
    with ThreadPoolExecutor(4) as pool:
        calls = [("PUT", f"/{other.name}", other.at_once())] * 4
        answers = list(pool.map(lambda call: replica.call(*call), calls))
    assert {status for status, _ in answers} <= {200, 409}
    assert held(replica) == [SMALL.name, other.name]
    assert replica.leftovers() == []


def test_nothing_shows_before_all_of_it_is_there(replica: Replica) -> None:
    first, last = SMALL.files
    stage(replica, SMALL, first)
    assert replica.call("POST", f"/{SMALL.name}", SMALL.manifest) == (202, {"missing": [last]})
    assert not (replica.root / SMALL.name).exists()
    assert held(replica) == []
    replica.push_all(SMALL)
    assert held(replica) == [SMALL.name]


def test_what_is_whole_is_not_asked_for_again(replica: Replica) -> None:
    path = replica.push_all(SMALL)
    told = {"path": path, "published": True}
    assert replica.call("POST", f"/{SMALL.name}", SMALL.manifest) == (200, told)
    # A client that was told of missing files before another one had sent them.
    target = f"/{SMALL.name}/adapter_config.json"
    assert replica.call("PUT", target, b"{}") == (204, None)
    assert replica.leftovers() == []


def test_the_replica_tells_who_it_is_and_how_much_room_it_has(replica: Replica) -> None:
    path = replica.push_all(SMALL)
    status, told = replica.call("GET")
    assert status == 200
    assert len(bytes.fromhex(told["instance"])) == 16
    assert told == {
        "protocol": 1,
        "version": rollmux_push.VERSION,
        "instance": told["instance"],
        "root": str(replica.root),
        "max_bytes": 2048 * MB,
        "used_bytes": 3 * BLOCK_BYTES,
        "adapters": [{"name": SMALL.name, "path": path, "bytes": 9}],
    }


def test_a_directory_that_somebody_removed_is_pushed_again(replica: Replica) -> None:
    path = Path(replica.push_all(SMALL))
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert held(replica) == []
    assert Path(replica.push_all(SMALL)).is_dir()


def test_two_pushes_of_one_name_at_once_both_end_well(replica: Replica) -> None:
    adapter = Adapter({"adapter_model.safetensors": os.urandom(5 * MB), "c.json": b"{}"})
    gate = threading.Barrier(4)

    def push() -> str:
        gate.wait()
        for name, data in (*adapter.files.items(), ("", b"")):
            status, _ = replica.call("POST", f"/{adapter.name}", adapter.manifest)
            assert status in (200, 202)
            if name:
                assert replica.call("PUT", f"/{adapter.name}/{name}", data) == (204, None)
        return replica.push_all(adapter)

    with ThreadPoolExecutor(4) as pool:
        paths = {future.result() for future in [pool.submit(push) for _ in range(4)]}
    assert paths == {str(replica.root / adapter.name)}
    assert adapter_dir.digest(Path(paths.pop())) == adapter.digest
    assert replica.leftovers() == []
    assert replica.push.store._used() == 2 * BLOCK_BYTES + 5 * MB


def test_a_file_that_comes_twice_at_once_is_counted_twice(replica: Replica) -> None:
    """And the one that comes last finds the adapter whole."""
    adapter = of_bytes(MB, "v1")
    target = f"/{adapter.name}/adapter_model.safetensors"
    stage(replica, adapter)
    data = adapter.files["adapter_model.safetensors"]
    with contextlib.closing(replica.sends_a_part(target, MB, data[:1000])) as slow:
        until(lambda: len(replica.leftovers()) == 2)
        assert replica.push.store._used() == BLOCK_BYTES + MB
        other = replica.sends_a_part(target, MB, data[:1000])
        until(lambda: replica.push.store._used() == BLOCK_BYTES + 2 * MB)
        other.close()
        until(lambda: replica.push.store._used() == BLOCK_BYTES + MB)
        replica.push_all(adapter)
        slow.sendall(data[1000:])
        assert b" 204 " in slow.recv(1000)
    assert replica.leftovers() == []
    assert replica.push.store._used() == BLOCK_BYTES + MB


# What makes room


@pytest.fixture
def small_room(served: Replica, tmp_path: Path) -> Iterator[Replica]:
    """A replica that keeps 1 MB: three adapters of 300 kB."""
    served.loras.clear()
    served.push = push_of(tmp_path / "push", ROLLMUX_PUSH_MAX_MB="1")
    yield served
    served.push.close()


def of_300_kb(number: int) -> Adapter:
    return of_bytes(300_000, f"v{number}")


def test_the_longest_unused_goes_first_and_what_is_listed_stays(small_room: Replica) -> None:
    one, two, three, four, five = (of_300_kb(n) for n in range(5))
    paths = [small_room.push_all(a) for a in (one, two, three)]
    small_room.list_adapter("one", paths[0] + "/")
    small_room.push_all(two)  # asked for again: younger than three
    small_room.push_all(four)
    assert held(small_room) == [one.name, two.name, four.name]
    assert not Path(paths[2]).exists()
    small_room.loras.clear()  # unlisted now, but seen listed a moment ago
    small_room.push_all(five)
    assert held(small_room) == [one.name, four.name, five.name]
    assert small_room.leftovers() == []


def test_an_adapter_that_fits_only_in_place_of_listed_ones_is_refused(
    small_room: Replica,
) -> None:
    kept = []
    for number in range(3):
        kept.append(of_300_kb(number))
        small_room.list_adapter(f"v{number}", small_room.push_all(kept[-1]))
    new = of_300_kb(4)
    assert small_room.call("POST", f"/{new.name}", new.manifest) == (507, "no_room")
    assert held(small_room) == [a.name for a in kept]
    assert small_room.leftovers() == []
    # Nothing goes for an adapter that would not fit all the same.
    small_room.loras.popitem()
    big = of_bytes(600_000, "big")
    assert small_room.call("POST", f"/{big.name}", big.manifest) == (507, "no_room")
    assert held(small_room) == [a.name for a in kept]


def test_nothing_is_taken_away_where_vllm_does_not_tell_what_it_lists(
    small_room: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        small_room.push_all(of_300_kb(number))
    monkeypatch.delattr(small_room.app.state, "openai_serving_models")
    new = of_300_kb(4)
    assert small_room.call("POST", f"/{new.name}", new.manifest) == (507, "no_room")
    assert small_room.call("DELETE", f"/{of_300_kb(0).name}") == (409, "listed")


def test_an_adapter_on_its_way_gives_room_when_its_client_is_gone(small_room: Replica) -> None:
    idle = [of_300_kb(n) for n in range(3)]
    for adapter in idle:
        stage(small_room, adapter)
    new = of_300_kb(4)
    assert small_room.call("POST", f"/{new.name}", new.manifest) == (507, "no_room")
    store = small_room.push.store
    now = store.now
    store.now = lambda: now() + rollmux_push.IDLE_S + 1
    small_room.push_all(new)
    gone = f"/{idle[0].name}/adapter_model.safetensors"
    assert small_room.call("PUT", gone, bytes(300_000)) == (409, "no_manifest")
    assert len(small_room.leftovers()) == 2


def test_a_half_sent_adapter_goes_after_ten_minutes(replica: Replica) -> None:
    stage(replica, SMALL, "adapter_config.json")
    store = replica.push.store
    now = store.now
    store.now = lambda: now() + STALE_S + 1
    replica.call("GET")
    assert replica.leftovers() == []
    assert replica.call("GET")[1]["used_bytes"] == 0


def test_many_tiny_adapters_are_bounded_by_their_number_too(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollmux_push, "MAX_ADAPTERS", 5)
    tiny = [of_bytes(3, f"{n:03}") for n in range(20)]
    for adapter in tiny:
        replica.push_all(adapter)
    assert held(replica) == [a.name for a in tiny[-5:]]
    assert len(names_in(replica.root)) == 5 + 4  # and its four own


def test_tiny_files_count_the_blocks_that_they_take(small_room: Replica) -> None:
    tiny = Adapter({f"{n:02}": b"x" for n in range(64)})
    small_room.push_all(tiny)
    assert small_room.call("GET")[1]["used_bytes"] == 65 * BLOCK_BYTES


def test_a_second_copy_of_a_file_makes_room_but_not_at_its_own_cost(small_room: Replica) -> None:
    one, two = of_bytes(400_000, "v1"), of_bytes(400_000, "v2")
    path = small_room.push_all(one)
    small_room.push_all(two)
    target = f"/{one.name}/adapter_model.safetensors"
    data = one.files["adapter_model.safetensors"]
    with contextlib.closing(small_room.sends_a_part(target, len(data), data[:1000])) as slow:
        until(lambda: small_room.leftovers() != [])
        assert held(small_room) == [one.name]
        # A third one does not fit, and what is being sent does not go for it.
        assert small_room.call("PUT", target, data) == (507, "no_room")
        assert small_room.call("POST", f"/{two.name}", two.manifest) == (507, "no_room")
        slow.sendall(data[1000:])
        assert b" 204 " in slow.recv(1000)
    assert Path(path, "adapter_model.safetensors").read_bytes() == data


# What is deleted


def test_delete_takes_whole_and_half_sent_adapters_but_none_that_is_listed(
    replica: Replica,
) -> None:
    target = f"/{SMALL.name}"
    assert replica.call("DELETE", target) == (404, "unknown")
    stage(replica, SMALL, "adapter_config.json")
    assert replica.call("DELETE", target) == (204, None)
    path = replica.push_all(SMALL)
    replica.list_adapter("policy", path)
    assert replica.call("DELETE", target) == (409, "listed")
    assert Path(path, "adapter_config.json").read_bytes() == b"{}"
    replica.loras.clear()
    assert replica.call("DELETE", target) == (204, None)
    assert not Path(path).exists()
    assert replica.leftovers() == []
    assert replica.call("GET")[1]["used_bytes"] == 0


def test_an_adapter_that_is_being_sent_is_neither_deleted_nor_replaced(replica: Replica) -> None:
    stage(replica, SMALL)
    target = f"/{SMALL.name}/adapter_model.safetensors"
    with contextlib.closing(replica.sends_a_part(target, 7, b"wei")) as slow:
        until(lambda: len(replica.leftovers()) == 2)
        assert replica.call("DELETE", f"/{SMALL.name}") == (409, "busy")
        other = SMALL.manifest
        other["files"][0]["bytes"] = 3
        assert replica.call("POST", f"/{SMALL.name}", other) == (409, "busy")
        slow.sendall(b"ghts")
        assert b" 204 " in slow.recv(1000)
    # Nobody sends any more: the later manifest counts, and by it other files are right.
    assert replica.call("POST", f"/{SMALL.name}", other)[0] == 202
    assert len(replica.leftovers()) == 1
    assert replica.call("PUT", target, b"weights") == (204, None)
    replica.call("DELETE", f"/{SMALL.name}")
    replica.push_all(SMALL)


# What is refused


@pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x", KEY[:-1]])
@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", ""),
        ("POST", f"/{SMALL.name}"),
        ("PUT", f"/{SMALL.name}/adapter_config.json"),
        ("DELETE", f"/{SMALL.name}"),
        ("GET", "/../x"),
    ],
)
def test_without_the_key_every_call_is_refused(
    replica: Replica, key: str | None, method: str, target: str
) -> None:
    stage(replica, SMALL)
    assert replica.call(method, target, b"{}", key=key) == (401, "wrong_key")
    assert replica.call("POST", f"/{SMALL.name}", SMALL.manifest)[0] == 202


@pytest.mark.parametrize("key", [None, "", KEY])
def test_a_replica_without_a_key_says_so_and_makes_no_folder(
    served: Replica, tmp_path: Path, key: str | None
) -> None:
    served.push = push_of(tmp_path / "push", ROLLMUX_PUSH_KEY=" ")
    assert served.call("GET", key=key) == (403, "no_key")
    assert served.call("POST", f"/{SMALL.name}", SMALL.manifest, key=key) == (403, "no_key")
    assert not (tmp_path / "push").exists()


NAMES = {
    "parent": "..",
    "encoded parent": "%2e%2e",
    "this": ".",
    "hidden": ".x",
    "empty": "",
    "absolute": "%2Fetc%2Fpasswd",
    "two components": "a%2Fb",
    "up and down": "..%2F..%2Fetc%2Fpasswd",
    "null": "a%00b",
    "not UTF-8": "%ff",
    "long": "a" * 256,
    "long when encoded": "%C3%B6" * 128,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_that_are_not_one_plain_component_are_refused(replica: Replica, name: str) -> None:
    bad = (400, "bad_name")
    with_digest = f"{name}-{SMALL.digest}" if name.strip(".") else name
    stage(replica, SMALL)
    assert replica.call("PUT", f"/{SMALL.name}/{name}", b"x") == bad
    if name != "":
        assert replica.call("POST", f"/{with_digest}", SMALL.manifest) == bad
        assert replica.call("DELETE", f"/{with_digest}") == bad
        assert replica.call("PUT", f"/{with_digest}/adapter_config.json", b"{}") == bad
    assert replica.call("POST", f"/{name}", SMALL.manifest) == bad


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        (f"/{SMALL.name}/../../../etc/passwd", (400, "bad_name")),
        (f"//{SMALL.name}", (400, "bad_name")),
        ("/", (400, "bad_name")),
        (f"/-{SMALL.digest}", (400, "bad_name")),
        (f"/{SMALL.name}0", (400, "bad_name")),
        (f"/x-{SMALL.digest.upper()}", (400, "bad_name")),
        (f"/{SMALL.name}/a/b", (404, "not_found")),
    ],
)
def test_paths_of_another_shape_are_refused(
    replica: Replica, target: str, answer: tuple[int, str]
) -> None:
    for method in ("POST", "PUT", "DELETE", "GET"):
        assert replica.call(method, target, SMALL.manifest) == answer


def test_other_methods_are_refused(replica: Replica) -> None:
    for method, target in (
        ("POST", ""),
        ("DELETE", ""),
        ("GET", f"/{SMALL.name}"),
        ("PATCH", f"/{SMALL.name}"),
        ("POST", f"/{SMALL.name}/x"),
        ("DELETE", f"/{SMALL.name}/x"),
    ):
        assert replica.call(method, target) == (405, "bad_method")


def change(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest | fields


def change_file(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest | {"files": [manifest["files"][0] | fields]}


DIGEST = "0" * 64
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[int, str]]] = {
    "not JSON": (lambda _: b"{", (400, "bad_manifest")),
    "empty": (lambda _: b"", (400, "bad_manifest")),
    "not UTF-8": (lambda _: b'"\xff"', (400, "bad_manifest")),
    "deep": (lambda _: b"[" * 200_000, (400, "bad_manifest")),
    "a number of 5000 digits": (lambda _: b"9" * 5000, (400, "bad_manifest")),
    "a list": (lambda m: [m], (400, "bad_manifest")),
    "no files key": (change(files=None), (400, "bad_manifest")),
    "no files": (change(files=[]), (400, "bad_manifest")),
    "files not objects": (change(files=["a"]), (400, "bad_manifest")),
    "another digest": (change(digest=DIGEST), (400, "bad_manifest")),
    "no digest": (change(digest=None), (400, "bad_manifest")),
    "a name twice": (lambda m: m | {"files": m["files"] * 2}, (400, "bad_manifest")),
    "bytes negative": (change_file(bytes=-1), (400, "bad_manifest")),
    "bytes true": (change_file(bytes=True), (400, "bad_manifest")),
    "bytes a float": (change_file(bytes=2.0), (400, "bad_manifest")),
    "bytes a text": (change_file(bytes="2"), (400, "bad_manifest")),
    "a file's digest short": (change_file(digest="ab"), (400, "bad_manifest")),
    "a file's digest none": (change_file(digest=None), (400, "bad_manifest")),
    "a file's digest with a newline": (change_file(digest=DIGEST + "\n"), (400, "bad_manifest")),
    "a name up": (change_file(name="../x"), (400, "bad_name")),
    "a name absolute": (change_file(name="/etc/passwd"), (400, "bad_name")),
    "a name with null": (change_file(name="a\0"), (400, "bad_name")),
    "a name hidden": (change_file(name=".lock"), (400, "bad_name")),
    "a name long": (change_file(name="a" * 256), (400, "bad_name")),
    "a name half a surrogate": (change_file(name="\ud800"), (400, "bad_name")),
    "a name none": (change_file(name=None), (400, "bad_name")),
    "more bytes than the bound": (change_file(bytes=2048 * MB), (413, "too_large")),
    "bytes beyond measure": (change_file(bytes=10**400), (413, "too_large")),
    "a manifest without end": (lambda _: b" " * 300_000, (413, "too_large")),
}


@pytest.mark.parametrize(("changed", "answer"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests_that_are_wrong_are_refused_and_reserve_nothing(
    replica: Replica, changed: Callable[[dict[str, Any]], Any], answer: tuple[int, str]
) -> None:
    assert replica.call("POST", f"/{SMALL.name}", changed(SMALL.manifest)) == answer
    assert replica.call("GET")[1]["used_bytes"] == 0
    assert replica.leftovers() == []


def test_ten_thousand_tiny_files_are_too_many(replica: Replica) -> None:
    line = {"bytes": 1, "digest": DIGEST}
    short = [line | {"name": str(n)} for n in range(65)]
    answer = (400, "too_many_files")
    assert replica.call("POST", f"/{SMALL.name}", SMALL.manifest | {"files": short}) == answer
    # So many do not even fit into a manifest.
    many = [line | {"name": str(n)} for n in range(10_000)]
    answer = (413, "too_large")
    assert replica.call("POST", f"/{SMALL.name}", SMALL.manifest | {"files": many}) == answer
    assert replica.leftovers() == []


def test_sixty_four_files_with_the_longest_names_fit(replica: Replica) -> None:
    adapter = Adapter({f"{n:02}" + "ö" * 126: b"" for n in range(64)})
    assert replica.call("POST", f"/{adapter.name}", adapter.manifest)[0] == 202


def test_files_that_are_not_what_the_manifest_says_are_refused_and_not_kept(
    replica: Replica,
) -> None:
    target = f"/{SMALL.name}/adapter_model.safetensors"
    assert replica.call("PUT", target, b"weights") == (409, "no_manifest")
    stage(replica, SMALL)
    for body, code in ((b"weight", "wrong_length"), (b"weights!", "wrong_length")):
        assert replica.call("PUT", target, body) == (400, code)
    assert replica.call("PUT", target, b"Weights") == (400, "wrong_digest")
    assert replica.call("PUT", f"/{SMALL.name}/other", b"") == (409, "no_manifest")
    chunked = {"transfer-encoding": "chunked"}
    assert replica.call("PUT", target, b"7\r\nweights\r\n0\r\n\r\n", headers=chunked) == (
        411,
        "no_length",
    )
    assert len(replica.leftovers()) == 1  # the folder on its way
    missing = replica.call("POST", f"/{SMALL.name}", SMALL.manifest)[1]["missing"]
    assert missing == list(SMALL.files)
    replica.push_all(SMALL)


def test_a_name_with_another_digest_than_its_files_is_refused_and_all_of_it_removed(
    replica: Replica,
) -> None:
    """Each file is right by a manifest whose name is a lie."""
    liar = Adapter(SMALL.files)
    liar.digest = DIGEST
    liar.name = f"policy-v1-{DIGEST}"
    stage(replica, liar, *liar.files)
    assert replica.call("POST", f"/{liar.name}", liar.manifest) == (400, "wrong_digest")
    assert held(replica) == []
    assert replica.leftovers() == []
    assert replica.call("GET")[1]["used_bytes"] == 0


def test_an_adapter_sent_at_once_that_is_wrong_leaves_nothing(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = Adapter(SMALL.files)
    liar.digest = DIGEST
    liar.name = f"policy-v1-{DIGEST}"
    target, right = f"/{SMALL.name}", SMALL.at_once()
    line = right.partition(b"\n")[0]
    for where, body, refusal in (
        (target, right[:-1], (400, "wrong_length")),
        (target, right + b"!", (400, "wrong_length")),
        (target, right[:-1] + b"S", (400, "wrong_digest")),
        (f"/{liar.name}", liar.at_once(), (400, "wrong_digest")),
        (target, line, (400, "bad_manifest")),
        (target, b"", (400, "bad_manifest")),
        (target, b" " * MAX_MANIFEST_BYTES + right, (400, "bad_manifest")),
        (target, b"{}\n", (400, "bad_manifest")),
        (f"/..%2F{SMALL.name}", right, (400, "bad_name")),
    ):
        assert replica.call("PUT", where, body) == refusal
        assert replica.leftovers() == []
        assert held(replica) == []
        assert replica.call("GET")[1]["used_bytes"] == 0
    assert replica.call("PUT", target, right, key="another") == (401, "wrong_key")
    chunked = {"transfer-encoding": "chunked"}
    assert replica.call("PUT", target, b"0\r\n\r\n", headers=chunked) == (411, "no_length")
    monkeypatch.setattr(rollmux_push, "MAX_WHOLE_BYTES", 3 * MB - MAX_MANIFEST_BYTES)
    big = of_bytes(3 * MB, "v1")
    assert replica.call("PUT", f"/{big.name}", big.at_once()) == (413, "too_large")
    with replica.sends_a_part(f"/{big.name}", 10**12, b"") as connection:
        assert b" 413 " in connection.recv(1000)  # before anything of it has come
    with replica.sends_a_part(target, len(right), right[:-1]):
        pass
    until(lambda: replica.leftovers() == [])
    assert held(replica) == []


def test_a_disk_that_fills_up_under_an_adapter_sent_at_once_leaves_nothing(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(upload: Upload, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Upload, "write", write)
        assert replica.call("PUT", f"/{SMALL.name}", SMALL.at_once()) == (507, "no_room")
    assert replica.leftovers() == []
    assert replica.call("GET")[1]["used_bytes"] == 0
    assert replica.call("PUT", f"/{SMALL.name}", SMALL.at_once())[0] == 200


async def test_a_body_that_goes_on_or_ends_early_is_refused_whatever_the_server_does(
    replica: Replica,
) -> None:
    """uvicorn cuts bodies to their length itself; another server may not."""
    stage(replica, SMALL)
    target = f"/rollmux/push/{SMALL.name}/adapter_model.safetensors"

    async def put(*pieces: bytes) -> Any:
        sent: list[Any] = []
        rest[:] = pieces

        async def receive() -> Any:
            if not rest:
                return {"type": "http.disconnect"}
            piece = rest.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(rest) or piece == b"-"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"x-rollmux-push-key", KEY.encode()), (b"content-length", b"7")]
        scope = {"type": "http", "method": "PUT", "path": target, "headers": headers}
        await replica.push(scope | {"app": replica.app}, receive, send)
        return (sent[0]["status"], sent[1]["body"]) if sent else None

    rest: list[bytes] = []
    for pieces in ((b"weights", b"!"), (b"wei",), (b"",), (b"wei", b"ghts", b"", b"!!")):
        status, body = await put(*pieces)
        assert (status, b"wrong_length" in body) == (400, True)
    assert (await put(*[bytes(CHUNK_BYTES)] * 3))[0] == 400
    assert len(rest) == 2  # no more is read than tells that it is wrong
    assert await put(b"-") is None  # nobody is there to be told
    assert await put(b"wei", b"", b"ghts") == (204, b"")


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_client_that_hangs_up_leaves_nothing(tmp_path: Path, http: str) -> None:
    replica = Replica()
    replica.push = push_of(tmp_path / "push")
    with contextlib.closing(replica.push), serving(replica, http) as replica.port:
        adapter = of_bytes(3 * MB, "v1")
        stage(replica, adapter)
        target = f"/{adapter.name}/adapter_model.safetensors"
        data = adapter.files["adapter_model.safetensors"]
        connection = replica.sends_a_part(target, 3 * MB, data[: 2 * MB])
        until(lambda: len(replica.leftovers()) == 2)
        connection.close()
        until(lambda: len(replica.leftovers()) == 1)
        replica.push_all(adapter)


def test_a_client_that_falls_silent_is_given_up(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(replica, SMALL)
    monkeypatch.setattr(rollmux_push, "IDLE_S", 0.05)
    target = f"/{SMALL.name}/adapter_model.safetensors"
    with contextlib.closing(replica.sends_a_part(target, 7, b"wei")) as connection:
        assert b" 408 " in connection.recv(1000)
    until(lambda: len(replica.leftovers()) == 1)


def test_a_file_that_comes_after_its_adapter_was_given_up_is_refused(replica: Replica) -> None:
    liar = Adapter({"weights": b"weights"})
    liar.digest = DIGEST
    liar.name = f"policy-v1-{DIGEST}"
    stage(replica, liar)
    target = f"/{liar.name}/weights"
    with contextlib.closing(replica.sends_a_part(target, 7, b"wei")) as slow:
        until(lambda: len(replica.leftovers()) == 2)
        assert replica.call("PUT", target, b"weights") == (204, None)
        assert replica.call("POST", f"/{liar.name}", liar.manifest) == (400, "wrong_digest")
        slow.sendall(b"ghts")
        assert b" 409 " in slow.recv(1000)
    assert replica.leftovers() == []


# A full disk


@pytest.fixture
def full_disk(served: Replica, tmp_path: Path) -> Iterator[tuple[Replica, Path]]:
    """A replica whose folder is a file system of 1 MB."""
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.strip()}")
    try:
        served.loras.clear()
        served.push = push_of(disk / "push")
        yield served, disk
        served.push.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_half_way_leaves_no_half_file(
    full_disk: tuple[Replica, Path],
) -> None:
    replica, disk = full_disk
    adapter = of_bytes(700_000, "v1")
    stage(replica, adapter)
    filler = disk / "filler"
    filler.write_bytes(bytes(600_000))
    target = f"/{adapter.name}/adapter_model.safetensors"
    assert replica.call("PUT", target, *adapter.files.values()) == (507, "no_room")
    assert len(replica.leftovers()) == 1
    filler.unlink()
    replica.push_all(adapter)


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_sent(
    full_disk: tuple[Replica, Path],
) -> None:
    replica, _ = full_disk
    first, second = of_bytes(600_000, "v1"), of_bytes(600_000, "v2")
    path = replica.push_all(first)
    replica.list_adapter("v1", path)
    assert replica.call("POST", f"/{second.name}", second.manifest) == (507, "no_room")
    replica.loras.clear()
    replica.push_all(second)
    assert held(replica) == [second.name]


# Processes


def test_dead_processes_leave_nothing_for_the_next_and_living_ones_are_left_alone(
    tmp_path: Path,
) -> None:
    script = (
        "import sys\nfrom deploy.replica.rollmux_push import Store\n"
        "print(Store(sys.argv[1], 1 << 20).root, flush=True)\nsys.stdin.read()\n"
    )
    base = tmp_path / "push"

    def start() -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", script, str(base)]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert child.stdout is not None
        return child, Path(child.stdout.readline().strip())

    killed, of_killed = start()
    ended, of_ended = start()
    try:
        (of_killed / "adapter").mkdir()
        (of_killed / "adapter" / "weights").write_bytes(b"x")
        (of_ended / "adapter").mkdir()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert names_in(base) == {of_killed.name, of_ended.name}
        third = Store(str(base), MB)
        assert names_in(base) == {of_ended.name, Path(third.root).name}
        ended.communicate(timeout=60)  # the end of its input, and of it
        assert names_in(base) == {Path(third.root).name}
        third.remove()
        assert names_in(base) == set()
    finally:
        for child in (killed, ended):
            child.kill()
            child.communicate()


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    base = tmp_path / "push"
    base.mkdir(0o700)
    for name in ("a" * 32, "b" * 32):
        (base / name).mkdir()
    (base / ("c" * 32)).symlink_to(outside)
    (base / ("a" * 32) / "adapter").symlink_to(outside)
    (base / ("b" * 32) / ".lock").symlink_to(outside / "precious")
    push = push_of(base)
    assert push.store is not None
    assert "a" * 32 not in names_in(base)
    assert (outside / "precious").read_bytes() == b"x"
    push.close()


@pytest.mark.parametrize("how", ["a link", "open to all", "a file", "nonsense"])
def test_a_folder_that_cannot_be_trusted_is_not_used_and_the_replica_serves_on(
    served: Replica, tmp_path: Path, how: str
) -> None:
    base = tmp_path / "push"
    (tmp_path / "elsewhere").mkdir()
    environ = {}
    if how == "a link":
        base.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        base.write_bytes(b"")
    elif how == "open to all":
        base.mkdir()
        base.chmod(0o777)
    else:
        environ["ROLLMUX_PUSH_MAX_MB"] = "lots"
    served.push = push_of(base, **environ)
    assert served.call("GET") == (503, "no_root")
    assert served.call("POST", f"/{SMALL.name}", SMALL.manifest) == (503, "no_root")
    assert names_in(tmp_path / "elsewhere") == set()
    answer = httpx.get(f"http://127.0.0.1:{served.port}/health", trust_env=False)
    assert answer.status_code == 200


# Everything else


def test_other_paths_pass_untouched(replica: Replica) -> None:
    url = f"http://127.0.0.1:{replica.port}"
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        for path in ("/v1/models", "/rollmux/pushy", "/rollmux", "/", "//rollmux/push"):
            answer = client.request("PUT", url + path, content=b"body")
            assert answer.json() == {"path": path, "method": "PUT", "body": "body"}
            assert "x-rollmux-push" not in answer.headers


async def test_scopes_that_are_no_requests_pass_untouched(tmp_path: Path) -> None:
    passed: list[Any] = []

    async def app(*call: Any) -> None:
        passed.append(call)

    push = AdapterPush(app, {"ROLLMUX_PUSH_KEY": KEY, "ROLLMUX_PUSH_ROOT": str(tmp_path / "push")})
    socket = {"type": "websocket", "path": "/rollmux/push"}
    for scope in ({"type": "lifespan"}, socket):
        call = (scope, object(), object())
        await push(*call)  # type: ignore[arg-type]
        assert passed.pop() == call
    push.close()


def test_other_calls_are_answered_while_files_are_worked_on(replica: Replica) -> None:
    """Files are the business of threads: one that is stuck stops no generation."""
    stage(replica, SMALL)
    with replica.push.store._lock, ThreadPoolExecutor(6) as pool:
        target = f"/{SMALL.name}/adapter_model.safetensors"
        stuck = [pool.submit(replica.call, "PUT", target, b"weights") for _ in range(6)]
        url = f"http://127.0.0.1:{replica.port}/v1/completions"
        assert httpx.post(url, trust_env=False, timeout=30).status_code == 200
        assert not any(call.done() for call in stuck)
        replica.push.store._lock.release()
        try:
            assert [call.result() for call in stuck] == [(204, None)] * 6
        finally:
            replica.push.store._lock.acquire()


def test_vllms_way_of_adding_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By class, with nothing but the environment; outermost, and made when the server starts."""
    monkeypatch.setenv("ROLLMUX_PUSH_KEY", KEY)
    monkeypatch.setenv("ROLLMUX_PUSH_ROOT", str(tmp_path / "push"))

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    replica = Replica()
    app = Starlette(routes=[Route("/health", health)])
    app.add_middleware(AdapterPush)
    app.state.openai_serving_models = replica.app.state.openai_serving_models
    with serving(app) as replica.port:
        (instance,) = names_in(tmp_path / "push")
        assert replica.call("GET")[1]["instance"] == instance
        path = replica.push_all(SMALL)
        replica.list_adapter("v1", path)
        assert replica.call("DELETE", f"/{SMALL.name}") == (409, "listed")
        url = f"http://127.0.0.1:{replica.port}"
        assert httpx.get(f"{url}/health", trust_env=False).json() == {}
    pushes: list[AdapterPush] = []
    stack: Any = app.middleware_stack
    while stack is not None:
        if isinstance(stack, AdapterPush):
            pushes.append(stack)
        stack = getattr(stack, "app", None)
    pushes[0].close()


def test_the_file_runs_where_vllm_runs() -> None:
    """Python 3.10, the standard library, and blake3."""
    text = Path(rollmux_push.__file__).read_text("utf-8")
    tree = ast.parse(text, feature_version=(3, 10))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"blake3"}
    assert not imported & {"tomllib"}


def test_its_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == rollmux_push.VERSION

"""Desired state: live and retired names, versions, and the arithmetic of adapter slots."""

from __future__ import annotations

import pytest

from broadcast.ledger import MAX_RESIDENT, MAX_RETIRED, Ledger, version_of
from routing.ids import AdapterName


def name(version: int) -> AdapterName:
    return AdapterName(f"trl-policy-v{version}")


def ledger(*versions: int, **options: float) -> Ledger:
    out = Ledger(**options)
    for version in versions:
        out.commit(name(version), f"/lora/v{version}", float(version))
    return out


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("trl-policy-v7", 7),
        ("trl-policy-v012", 12),
        ("policy", None),
        ("policy-v", None),
        ("policy-v1-final", None),
        ("v3", None),
        ("x-v" + "9" * 40, None),
    ],
)
def test_the_version_is_the_number_at_the_end_of_the_name(text: str, version: int | None):
    assert version_of(text) == version


def test_names_are_live_in_order_of_commit():
    book = ledger(1, 2)
    book.commit(name(1), "/elsewhere/v1", 9.0)
    assert book.live_names() == (name(2), name(1))
    assert book.latest is not None
    assert (book.latest.path, book.policy_version) == ("/elsewhere/v1", 1)


def test_a_path_of_our_own_names_the_bytes():
    book = Ledger()
    given = book.commit(name(1), "/lora/v1", 0.0)
    own = book.commit(name(2), "/lora/v2", 0.0, loaded_from="/lora/.rollmux/v2-abc", digest="abc")
    assert (given.loaded_from, given.names_the_bytes("/lora/v1")) == ("/lora/v1", False)
    assert own.loaded_from == "/lora/.rollmux/v2-abc"
    assert own.names_the_bytes(own.loaded_from)


def test_files_pushed_to_a_replica_are_known_by_the_digest_in_their_path():
    adapter = Ledger().commit(name(1), "/lora/v1", 0.0, digest="ab" * 32)
    pushed = f"/dev/shm/rollmux/{'0' * 8}/{name(1)}-{'ab' * 32}"
    assert adapter.is_at(pushed)
    assert adapter.names_the_bytes(pushed)
    assert not adapter.is_at(pushed.replace("ab", "cd"))
    assert not Ledger().commit(name(1), "/lora/v1", 0.0).is_at("/elsewhere/v1-")


def test_names_without_a_number_count_as_versions_by_commit():
    book = Ledger()
    assert book.policy_version == 0
    book.commit(AdapterName("a"), "/a", 0.0)
    book.commit(AdapterName("b"), "/b", 0.0)
    assert book.policy_version == 2


def test_an_unloaded_name_is_known_still_and_not_live():
    book = ledger(1, 2)
    assert book.retire(name(1), 10.0)
    assert (book.live_names(), book.retired_names()) == ((name(2),), (name(1),))
    assert book.known(name(1))
    adapter = book.get(name(1))
    assert adapter is not None
    assert adapter.path == "/lora/v1"
    assert not book.retire(name(1), 11.0)
    assert not book.retire("never-seen", 11.0)


def test_a_retired_name_is_forgotten_once_nobody_named_it_for_the_grace_time():
    book = ledger(1, 2, retire_grace_s=60.0)
    book.retire(name(1), 10.0)
    book.named(name(1), 50.0)
    assert book.retirable(109.0, inflight=()) == ()
    assert book.retirable(110.0, inflight=()) == (name(1),)
    assert book.forget(name(1))
    assert not book.known(name(1))
    assert not book.forget(name(1))


def test_a_name_with_a_running_request_is_not_forgotten():
    book = ledger(1, retire_grace_s=60.0)
    book.retire(name(1), 0.0)
    assert book.retirable(1e6, inflight={name(1)}, unreadable={name(1)}) == ()


def test_a_name_whose_files_are_gone_is_forgotten_without_grace():
    """An engine that evicted it would die reading it back for a request."""
    book = ledger(1, 2, retire_grace_s=60.0)
    book.retire(name(1), 0.0)
    book.retire(name(2), 0.0)
    assert book.retirable(0.0, inflight=(), unreadable={name(1)}) == (name(1),)


def test_a_name_loaded_again_is_retired_no_more():
    book = ledger(1)
    book.retire(name(1), 1.0)
    book.commit(name(1), "/lora/again", 2.0)
    assert (book.live_names(), book.retired_names()) == ((name(1),), ())


def test_too_many_retired_names_are_forgotten_oldest_first():
    book = Ledger(retire_grace_s=1e9)
    for version in range(MAX_RETIRED + 2):
        book.commit(name(version), "/p", 0.0)
        book.retire(name(version), 0.0)
    assert book.retirable(0.0, inflight=()) == (name(0), name(1))


def test_every_change_that_a_replica_has_to_follow_grows_the_revision():
    book = Ledger()
    seen = [book.revision]
    for change in (
        lambda: book.commit(name(1), "/p", 0.0),
        lambda: book.retire(name(1), 0.0),
        lambda: book.forget(name(1)),
        book.cache_cleared,
        book.weights_changed_in_place,
    ):
        change()
        seen.append(book.revision)
    assert seen == sorted(set(seen))
    book.named(name(1), 1.0)
    book.forget(name(1))
    assert book.revision == seen[-1]


def test_unloading_frees_no_slot():
    """O-13: the engine keeps the copy until it is pushed out."""
    book = ledger(1, 2, 3)
    book.retire(name(1), 5.0)
    book.forget(name(1))
    assert book.next_evicted(max_cpu_loras=4) == ()
    assert book.next_evicted(max_cpu_loras=3) == (name(1),)


def test_what_was_named_lately_is_pushed_out_last():
    book = ledger(1, 2, 3)
    book.named(name(1), 5.0)
    assert book.next_evicted(max_cpu_loras=3) == (name(2),)
    book.loaded(name(4))
    assert book.next_evicted(max_cpu_loras=3) == (name(2), name(3))


def test_names_from_clients_do_not_make_the_ledger_grow():
    book = ledger(1)
    for n in range(100):
        book.named(f"made-up-{n}", 0.0)
    assert book.next_evicted(max_cpu_loras=1) == (name(1),)
    for n in range(2 * MAX_RESIDENT):
        book.loaded(name(n))
    assert len(book._resident) == MAX_RESIDENT


@pytest.mark.parametrize(
    ("max_loras", "max_cpu_loras", "most_live", "words"),
    [
        (6, 12, 5, []),
        (5, 12, 5, ["--max-loras 6"]),
        (6, 6, 5, ["--max-cpu-loras 12"]),
        (2, 2, None, ["--max-loras 3", "--max-cpu-loras 6"]),
        (None, None, 5, []),
    ],
)
def test_too_few_slots_are_said_with_the_option_that_helps(
    max_loras: int | None, max_cpu_loras: int | None, most_live: int | None, words: list[str]
):
    """O-14: each sync loads before it unloads."""
    warnings = ledger(1, 2).slot_warnings(max_loras, max_cpu_loras, most_live)
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_no_adapters_need_no_slots():
    assert Ledger().slot_warnings(1, 1) == ()

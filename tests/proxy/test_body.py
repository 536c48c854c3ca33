"""What a body says to routing, whatever JSON it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import body
from proxy.body import MAX_WEIGHT, Bodies, NotJson, parse
from routing.blocks import chain

DEEP = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"


def test_a_rollout_of_token_ids():
    generation = parse(b'{"model":"v3","prompt":[1,2,3],"n":1}')
    assert (generation.model, list(generation.prompt)) == ("v3", [1, 2, 3])
    assert (generation.weight, generation.stream) == (1, False)


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"prompt": [1], "n": 8}, 8),
        ({"prompt": [[1], [2], [3]], "n": 2}, 6),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": "a", "n": 0}, 1),
        ({"prompt": "a", "n": -3}, 1),
        ({"prompt": "a", "n": True}, 1),
        ({"prompt": "a", "n": "8"}, 8),
        ({"prompt": "a", "n": "eight"}, 1),
        ({"prompt": "a", "n": 8.0}, 8),
        ({"prompt": "a", "n": float("inf")}, 1),
        ({"prompt": "a", "n": None}, 1),
        ({"prompt": "a", "n": 2.5}, 1),
        ({"prompt": "a", "n": 10**9}, MAX_WEIGHT),
        ({"messages": [{"role": "user", "content": "x"}], "n": 3}, 3),
        ({"token_ids": [1, 2], "sampling_params": {"n": 4}}, 4),
        ({"token_ids": [1, 2], "sampling_params": {}}, 1),
        ({"token_ids": [1, 2], "sampling_params": {"n": None}}, 1),
        ({"token_ids": [1, 2], "sampling_params": [7]}, 1),
    ],
)
def test_the_weight_is_what_the_replica_will_run(fields, weight):
    assert parse(json.dumps(fields).encode()).weight == weight


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m"}',
        b'{"prompt":null}',
        b'{"prompt":[]}',
        b'{"prompt":[[]]}',
        b'{"prompt":[5]}',
        b'{"prompt":[2147483648,99999999999999999999]}',
        b'{"prompt":[-1,1.5,null,true,"x",{"a":[1]}]}',
        b'{"prompt":{"a":1}}',
        b'{"prompt":17}',
        b'{"prompt":"\\ud800 lone"}',
        b'{"prompt":["\\ud800"]}',
        b'{"messages":[]}',
        b'{"messages":null}',
        b'{"messages":"x"}',
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}]}',
        b'{"messages":[{"content":"\\ud800"}],"tools":[{"a":NaN}]}',
        b'{"model":null,"prompt":"x"}',
        b'{"model":["a"],"prompt":"x"}',
        b'{"model":"\\ud800","prompt":"x"}',
        b'{"prompt":"x","seed":1e999,"a":-Infinity}',
        b'\xef\xbb\xbf{"prompt":"bom"}',
        b"{}",
    ],
)
def test_any_json_object_can_be_routed(body):
    generation = parse(body)
    chain(generation.model, generation.prompt, 16)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"hello", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"prompt":"cut', "not JSON"),
        (b"[1,2]", "JSON array"),
        (b'"text"', "JSON string"),
        (b"17", "JSON number"),
        (b"true", "JSON boolean"),
        (b"null", "JSON null"),
        (DEEP, "not JSON"),
        (b'{"seed":' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_no_json_object_is_told_what_it_is(body, why):
    with pytest.raises(NotJson, match=why):
        parse(body)


def test_a_longer_conversation_begins_with_the_bytes_of_a_shorter_one():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    short = parse(json.dumps({"messages": turns[:1], "tools": [1], "system": "s"}).encode())
    longer = parse(json.dumps({"messages": turns, "tools": [1], "system": "s"}).encode())
    assert isinstance(longer.prompt, bytes)
    assert longer.prompt.startswith(bytes(short.prompt))


def test_tools_and_system_text_come_first_as_a_chat_template_puts_them():
    plain = {"messages": [{"role": "user", "content": "a"}]}
    with_tools = parse(json.dumps(plain | {"tools": [{"name": "t"}]}).encode()).prompt
    assert bytes(with_tools).startswith(b'[[{"name":"t"}]]')


def test_only_true_is_a_stream():
    assert parse(b'{"prompt":"x","stream":true}').stream
    for value in (b"false", b"null", b'"true"', b"1"):
        assert not parse(b'{"prompt":"x","stream":' + value + b"}").stream


@pytest.mark.parametrize(
    ("fields", "single"),
    [
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1, 2]], "n": 1}, True),
        ({"messages": [{"role": "user", "content": "x"}]}, True),
        ({"token_ids": [1], "sampling_params": {"n": 1}}, True),
        ({"prompt": [1, 2], "n": 2}, False),
        ({"prompt": [1, 2], "n": "1"}, False),  # looking at all of the reply is never wrong
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "x", "prompt_embeds": ["a", "b"]}, False),
        ({"prompt": "x", "n": 2, "sampling_params": {"n": 1}}, False),
        ({"token_ids": [1], "sampling_params": {"n": 3}}, False),
    ],
)
def test_a_single_choice_is_told_from_several(fields, single):
    assert parse(json.dumps(fields).encode()).single is single


# Bodies that were read before

TRL = b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": %d}'


@pytest.mark.parametrize("behind", [b"}", b', "min_p": 0.05}', b', "min_p": 1e-05, "n": 2}'])
def test_rollouts_that_differ_in_their_seed_alone_are_parsed_once(monkeypatch, behind):
    parsed = []
    monkeypatch.setattr(body, "parse", lambda found: (parsed.append(found), parse(found))[1])
    bodies, group = Bodies(), TRL[:-1] + behind
    first = bodies.read(group % 9_223_372_036_854_775_807)
    assert first == parse(group % 1)
    assert all(bodies.read(group % seed) is first for seed in range(8))
    assert bodies.read((group % 0).replace(b"[1", b"[4")) is not first
    assert bodies.read((group % 0).replace(b"v3", b"v4")).model == "v4"
    assert len(parsed) == 3


@pytest.mark.parametrize(
    "other",
    [
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5, "n": 2}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5, "min_p": 0}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "more": {"seed": 5}}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5.5}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed":5}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "user": "\\"seed\\": 5}"}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "Seed": 5}',
    ],
)
def test_what_only_looks_like_a_seed_at_the_end_is_read_as_it_is(other):
    bodies = Bodies()
    bodies.read(TRL % 5)
    assert bodies.read(other) == parse(other)


@pytest.mark.parametrize(
    "broken",
    [
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 007}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": }',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed":',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5}}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5, "n"}',
        b'{"model": "v3", "prompt": [1, 2, 3], "n": 1, "seed": 5, }',
        b"",
    ],
)
def test_what_is_no_json_is_refused_though_a_good_one_began_so(broken):
    bodies = Bodies()
    bodies.read(TRL % 5)
    with pytest.raises(NotJson):
        bodies.read(broken)


NAMES = st.sampled_from(["model", "prompt", "n", "seed", "min_p", "stream", '"seed": 5}'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["a", '"seed": 5}', "5}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=8))
def test_what_was_read_before_changes_nothing(said):
    bodies = Bodies()
    for data in said + said:
        for text in (json.dumps(data), json.dumps(data, separators=(",", ":"))):
            assert bodies.read(text.encode()) == parse(text.encode())


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(body, "KEPT_BYTES", 10_000)
    bodies = Bodies()
    for number in range(100):
        bodies.read(b'{"prompt": "%d"}' % (10**40 + number))
    assert 9_000 < bodies._kept_bytes == sum(len(b) + 256 for b in bodies._kept) <= 10_000
    latest = bodies.read(b'{"prompt": "%d"}' % (10**40 + 99))
    assert bodies.read(b'{"prompt": "%d"}' % (10**40 + 99)) is latest
    bodies.read(b'{"prompt": "%s"}' % (b"x" * 20_000))  # would push all others out
    assert bodies.read(b'{"prompt": "%d"}' % (10**40 + 99)) is latest

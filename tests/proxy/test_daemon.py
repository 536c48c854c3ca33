"""The daemon as a whole: it starts, answers, and stops clean."""

from __future__ import annotations


async def test_a_rollout_is_answered_by_a_ready_replica_and_says_which(start, pair):
    running = await start([r.url for r in pair])
    answer = await running.complete("tiny", list(range(40)))
    assert answer.status_code == 200
    assert answer.headers["x-rollmux-replica"] in ("r0", "r1")
    assert answer.headers["x-rollmux-route"] == "unmatched"
    assert answer.json()["choices"][0]["token_ids"] == pair[0].expected_tokens(
        "tiny", list(range(40)), 8
    )


async def test_the_second_rollout_of_a_prompt_goes_where_the_first_went(start, pair):
    running = await start([r.url for r in pair])
    first = await running.complete("tiny", list(range(40)))
    second = await running.complete("tiny", list(range(40)))
    assert second.headers["x-rollmux-route"] == "affinity"
    assert second.headers["x-rollmux-replica"] == first.headers["x-rollmux-replica"]

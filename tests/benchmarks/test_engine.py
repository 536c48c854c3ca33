"""The engine model: batches, prefix cache, adapter slots, pauses, on a clock handed in."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from benchmarks.engine import Adapter, Engine, EngineConfig, Job, Outcome, Pause, chain

SIXTEEN = EngineConfig(step_s=1.0, prefill_token_s=0.0, max_num_seqs=2)


def job(name: str, *, output: int = 4, prompt: int = 33, adapter: Adapter | None = None) -> Job:
    key = adapter.name if adapter is not None else ""
    return Job(name, chain(key, range(prompt), 16), prompt, output, adapter)


def ended(engine: Engine, now_s: float) -> dict[str, Outcome]:
    engine.advance(now_s)
    return {outcome.job.id: outcome for outcome in engine.take_outcomes()}


def adapter(number: int, digest: str = "", name: str = "") -> Adapter:
    return Adapter(number, name or f"v{number}", f"/lora/v{number}", digest or f"d{number}")


def test_first_token_comes_with_the_prefill_and_the_others_one_a_step() -> None:
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=0.1))
    engine.submit(0.0, job("a", output=4, prompt=20))
    engine.advance(1.9)
    assert engine.produced("a") == 0
    engine.advance(2.0)
    assert engine.produced("a") == 1
    engine.advance(4.5)
    assert engine.produced("a") == 3
    assert ended(engine, 5.0)["a"].tokens == 4


def test_a_bigger_batch_slows_everybody() -> None:
    engine = Engine(EngineConfig(step_s=1.0, step_per_seq_s=1.0, prefill_token_s=0.0))
    engine.submit(0.0, job("a", output=3))
    assert engine.next_event_s() == 0.0
    assert ended(engine, 4.0)["a"].at_s == 4.0
    engine.submit(4.0, job("b", output=3))
    engine.submit(4.0, job("c", output=3))
    assert ended(engine, 9.9) == {}
    assert set(ended(engine, 10.0)) == {"b", "c"}


def test_who_finds_no_room_waits_for_its_turn() -> None:
    engine = Engine(SIXTEEN)
    for name in "abc":
        engine.submit(0.0, job(name))
    engine.advance(1.0)
    assert (engine.gauges.running, engine.gauges.waiting) == (2, 1)
    assert set(ended(engine, 3.0)) == {"a", "b"}
    assert ended(engine, 6.0)["c"].at_s == 6.0


def test_whole_blocks_of_a_known_prompt_are_not_computed_again() -> None:
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=1.0))
    engine.submit(0.0, job("a", output=1, prompt=40))
    assert ended(engine, 40.0)["a"].cached_tokens == 0
    engine.submit(40.0, job("b", output=1, prompt=40))
    outcome = ended(engine, 48.0)["b"]
    assert (outcome.cached_tokens, outcome.at_s) == (32, 48.0)
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (80, 32)


def test_a_prompt_that_waits_to_be_computed_is_found_by_the_next() -> None:
    """A group's rollouts come at once: only the first of them computes the prompt, as in vLLM."""
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=1.0))
    for name in "ab":
        engine.submit(0.0, job(name, output=1, prompt=40))
    outcomes = ended(engine, 48.0)
    assert [outcomes[name].cached_tokens for name in "ab"] == [0, 32]
    assert [outcomes[name].at_s for name in "ab"] == [40.0, 48.0]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """A prompt of exactly two blocks finds only its first in the cache, as in vLLM."""
    engine = Engine(EngineConfig(prefill_token_s=0.0))
    engine.submit(0.0, job("a", output=1, prompt=32))
    engine.submit(1.0, job("b", output=1, prompt=32))
    assert ended(engine, 2.0)["b"].cached_tokens == 16


def test_the_cache_forgets_the_least_recently_used_block() -> None:
    engine = Engine(EngineConfig(num_blocks=2, prefill_token_s=0.0))
    engine.store([1, 2], "w")
    engine.store([1], "w")
    engine.store([3], "w")
    assert list(engine._cache) == [1, 3]


def test_blocks_of_other_weights_under_the_same_name_spoil_the_reply() -> None:
    engine = Engine(EngineConfig(prefill_token_s=0.0))
    first, second = adapter(1, "A", "v1"), adapter(2, "B", "v1")
    engine.add_adapter(0.0, first)
    engine.submit(0.0, job("a", adapter=first))
    engine.add_adapter(1.0, second)
    engine.submit(1.0, job("b", adapter=second))
    assert ended(engine, 2.0)["b"].weights == "B+A"
    assert engine.reset_prefix_cache(3.0)
    engine.submit(3.0, job("c", adapter=second))
    assert ended(engine, 4.0)["c"].weights == "B"


def test_an_adapter_too_many_is_passed_over_and_others_are_not() -> None:
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=0.0, max_loras=1))
    one, two = adapter(1), adapter(2)
    for a in (one, two):
        engine.add_adapter(0.0, a)
    engine.submit(0.0, job("a", adapter=one))
    engine.submit(0.0, job("b", adapter=two))
    engine.submit(0.0, job("c", adapter=one))
    engine.advance(1.0)
    assert (engine.gauges.running, engine.gauges.deferred) == (2, 1)
    assert engine.waiting_adapters() == {"v2"}
    assert set(ended(engine, 3.0)) == {"a", "c"}
    assert set(ended(engine, 6.0)) == {"b"}


def test_an_evicted_adapter_is_read_again() -> None:
    reads: list[str] = []

    def reload(a: Adapter) -> str:
        reads.append(a.name)
        return "read again"

    engine = Engine(EngineConfig(max_cpu_loras=2, prefill_token_s=0.0), reload)
    for number in (1, 2, 3):
        engine.add_adapter(0.0, adapter(number))
    assert list(engine.adapters) == [2, 3]
    engine.submit(0.0, job("a", adapter=adapter(1)))
    assert reads == ["v1"]
    assert ended(engine, 1.0)["a"].weights == "read again"


def test_an_evicted_adapter_whose_files_are_gone_kills_the_engine() -> None:
    engine = Engine(EngineConfig(step_s=1.0, max_cpu_loras=1), lambda a: None)
    engine.add_adapter(0.0, adapter(1))
    engine.add_adapter(0.0, adapter(2))
    engine.submit(0.0, job("running", adapter=adapter(2)))
    engine.submit(0.0, job("evicted", adapter=adapter(1)))
    outcomes = ended(engine, 0.0)
    assert engine.dead
    assert {o.reason for o in outcomes.values()} == {"error"}
    assert set(outcomes) == {"running", "evicted"}


def test_a_load_that_evicts_a_running_adapter_without_files_kills_the_engine() -> None:
    """With a spare slot the same load is harmless: running adapters are touched."""
    for slots, dies in ((1, True), (2, False)):
        engine = Engine(EngineConfig(step_s=1.0, max_cpu_loras=slots), lambda a: None)
        engine.add_adapter(0.0, adapter(1))
        engine.submit(0.0, job("a", adapter=adapter(1)))
        engine.add_adapter(1.0, adapter(2))
        assert engine.dead is dies


def test_keep_freezes_and_resume_goes_on_where_it_was() -> None:
    engine = Engine(SIXTEEN)
    engine.submit(0.0, job("a"))
    engine.pause(1.0, "keep", clear_cache=False)
    engine.submit(2.0, job("b"))
    assert ended(engine, 100.0) == {}
    assert engine.produced("a") == 2
    assert engine.next_event_s() is None
    assert not engine.reset_prefix_cache(100.0)
    engine.resume(100.0)
    assert set(ended(engine, 102.0)) == {"a"}
    assert engine.counters.preemptions == 0


def test_keep_with_its_default_clears_the_cache_and_preempts_what_runs() -> None:
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=1.0))
    engine.submit(0.0, job("a", output=10, prompt=33))
    engine.advance(35.0)
    assert engine.produced("a") == 3
    engine.pause(35.0, "keep")
    assert engine.counters.preemptions == 1
    engine.resume(50.0)
    engine.advance(50.0 + 36)  # prompt and reply so far, all over again
    assert engine.produced("a") == 4
    assert ended(engine, 50.0 + 36 + 6)["a"].tokens == 10


def test_gauges_stand_still_while_frozen() -> None:
    engine = Engine(SIXTEEN)
    engine.submit(0.0, job("a"))
    engine.pause(1.0, "keep", clear_cache=False)
    engine.submit(2.0, job("b"))
    engine.advance(3.0)
    assert (engine.gauges.running, engine.gauges.waiting) == (1, 0)


def test_abort_mode_ends_everything_with_what_is_there() -> None:
    engine = Engine(SIXTEEN)
    for name in "abc":
        engine.submit(0.0, job(name, output=10))
    engine.pause(2.0, "abort")
    outcomes = ended(engine, 2.0)
    assert {o.reason for o in outcomes.values()} == {"abort"}
    assert {name: o.tokens for name, o in outcomes.items()} == {"a": 3, "b": 3, "c": 0}


def test_wait_mode_lets_the_running_finish_and_admits_nobody() -> None:
    engine = Engine(SIXTEEN)
    for name in "abc":
        engine.submit(0.0, job(name))
    engine.pause(1.0, "wait")
    assert engine.busy()
    assert set(ended(engine, 50.0)) == {"a", "b"}
    assert not engine.busy()
    engine.resume(50.0)
    assert set(ended(engine, 53.0)) == {"c"}


def test_a_load_holds_up_the_engine() -> None:
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=0.0, load_s=5.0))
    engine.submit(0.0, job("a", output=3))
    engine.add_adapter(1.0, adapter(1))
    assert ended(engine, 6.9) == {}
    assert ended(engine, 7.0)["a"].at_s == 7.0


def test_an_update_in_place_mixes_what_runs() -> None:
    engine = Engine(SIXTEEN)
    engine.submit(0.0, job("a"))
    engine.update_base_weights(1.0)
    assert ended(engine, 9.0)["a"].weights == "base1+base"


class Bookkeeping(RuleBasedStateMachine):
    """Whatever happens: each job ends once, and memory is back when nobody is left."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            EngineConfig(step_s=1.0, prefill_token_s=0.01, max_num_seqs=3, num_blocks=12)
        )
        self.now_s = 0.0
        self.open: set[str] = set()
        self.count = 0

    def settle(self) -> None:
        for outcome in self.engine.take_outcomes():
            assert outcome.job.id in self.open
            self.open.discard(outcome.job.id)
            assert 0 <= outcome.tokens <= outcome.job.output_tokens

    @rule(output=st.integers(1, 60), prompt=st.integers(1, 80))
    def submit(self, output: int, prompt: int) -> None:
        self.count += 1
        self.open.add(str(self.count))
        self.engine.submit(self.now_s, job(str(self.count), output=output, prompt=prompt))

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.engine.advance(self.now_s)

    @rule(mode=st.sampled_from(["keep", "wait", "abort"]), clear=st.booleans())
    def pause(self, mode: str, clear: bool) -> None:
        self.engine.pause(self.now_s, mode, clear)

    @rule()
    def resume(self) -> None:
        self.engine.resume(self.now_s)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.engine.reset_prefix_cache(self.now_s, running)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.settle()
        if self.open:
            self.engine.abort(self.now_s, [data.draw(st.sampled_from(sorted(self.open)))])

    @invariant()
    def limits_hold(self) -> None:
        self.settle()
        assert len(self.engine._running()) <= 3
        assert self.engine._held == sum(s.blocks_held for s in self.engine._running())
        assert set(self.engine._sequences) == self.open

    def teardown(self) -> None:
        self.engine.resume(self.now_s)
        assert self.engine.paused is Pause.NONE
        self.engine.advance(self.now_s + 1e6)
        self.settle()
        assert not self.open
        assert self.engine._held == 0
        assert not self.engine._finishes or self.engine._next_finish() == float("inf")


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_time_goes_on_when_the_rest_of_a_step_is_too_short_for_the_clock():
    """Late clock, short steps: ``now + rest == now`` must not be waited for."""
    engine = Engine(EngineConfig(step_s=0.0002), lambda adapter: adapter.digest)
    for number in range(2000):
        now_s = 40_000.0 + number / 7
        engine.advance(now_s)
        engine.submit(now_s, Job(f"{number}", (), 3, 1 + number % 90))
        for part in range(1, 8):
            engine.advance(now_s + part * 0.0031)
    assert len(engine.take_outcomes()) > 1900

"""The supervisor, by playing histories: events in, commands out, no process."""

from __future__ import annotations

from signal import Signals

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainer_entry import supervisor as sup
from trainer_entry.supervisor import (
    Cleaned,
    CleanFailed,
    CleanFleet,
    CleanRefused,
    CleanUnanswered,
    Command,
    DaemonDied,
    Event,
    Exit,
    FleetSeen,
    FlushSeen,
    KillDaemon,
    KillTrainer,
    Limits,
    NoneLeft,
    Phase,
    Released,
    ReleaseFleet,
    Say,
    Signalled,
    SignalTrainer,
    StartDaemon,
    StartTrainer,
    State,
    StopDaemon,
    SweepTrainer,
    Tick,
    TrainerExited,
    TrainerNotStarted,
    WatchFleet,
    WatchFlush,
)

TERM, INT = Signalled(Signals.SIGTERM), Signalled(Signals.SIGINT)


class History:
    """Plays events at times; ``did`` are the commands of the last one without what was said."""

    def __init__(self, *, leads: bool = True, drain_s: float = 20.0, flush: bool = False) -> None:
        self.now_s = 1000.0
        self.limits = Limits(start_timeout_s=60.0, drain_s=drain_s, leads=leads, flush=flush)
        self.said: list[str] = []
        self.state, commands = sup.begin(self.limits, self.now_s)
        self.did = self._without_said(commands)

    def _without_said(self, commands: tuple[Command, ...]) -> list[Command]:
        self.said += [command.text for command in commands if isinstance(command, Say)]
        return [command for command in commands if not isinstance(command, Say)]

    def play(self, *events: Event, after_s: float = 0.0) -> list[Command]:
        self.now_s += after_s
        for event in events:
            self.state, commands = sup.step(self.state, event, self.now_s)
            self.did = self._without_said(commands)
        return self.did

    def to_deadline(self) -> list[Command]:
        assert self.state.deadline_s is not None
        self.now_s = self.state.deadline_s
        return self.play(Tick())

    @classmethod
    def training(cls, *, drain_s: float = 20.0, flush: bool = False) -> History:
        history = cls(drain_s=drain_s, flush=flush)
        history.play(FleetSeen(True), Cleaned())
        assert history.did == [StartTrainer()]
        return history


def test_an_ordinary_run_does_each_step_once_and_in_order() -> None:
    history = History()
    assert history.did == [StartDaemon(), WatchFleet()]
    assert history.play(FleetSeen(False, ("http://b joining",)), after_s=1) == []
    assert history.play(FleetSeen(True), after_s=1) == [CleanFleet()]
    assert history.play(Cleaned()) == [StartTrainer()]
    assert history.state.deadline_s is None
    assert history.play(Tick(), after_s=1_000_000) == []
    assert history.play(TrainerExited(0)) == [SweepTrainer()]
    assert history.play(NoneLeft()) == [ReleaseFleet()]
    assert history.play(Released()) == [StopDaemon()]
    assert history.play(DaemonDied(0)) == [Exit(0)]


@pytest.mark.parametrize(("code", "ours"), [(0, 0), (7, 7), (-15, 143), (-9, 137), (-40, 168)])
def test_the_trainers_end_is_our_exit_code(code: int, ours: int) -> None:
    history = History.training()
    history.play(TrainerExited(code), NoneLeft(), Released())
    assert history.play(DaemonDied(0)) == [Exit(ours)]


def test_waiting_says_who_is_missing_when_that_changes_and_now_and_then() -> None:
    history = History()
    both, one = FleetSeen(False, ("http://a down", "http://b joining")), FleetSeen(False, ("x",))
    history.play(both)
    for _ in range(9):
        history.play(both, after_s=1)
    assert len(history.said) == 1
    history.play(both, after_s=1)
    history.play(one)
    assert [line.split(" (")[0] for line in history.said] == [
        "waiting for http://a down; http://b joining",
        "waiting for http://a down; http://b joining",
        "waiting for x",
    ]


def test_a_fleet_that_never_comes_ends_the_start_and_names_who_is_missing() -> None:
    history = History()
    history.play(FleetSeen(False, ("http://b:8000 down",)))
    assert history.to_deadline() == [StopDaemon()]
    assert history.now_s == 1000 + 60 + sup.START_SLACK_S
    assert "still missing: http://b:8000 down" in history.said[-1]
    assert history.play(DaemonDied(0)) == [Exit(1)]


def test_a_fleet_that_is_enough_without_one_replica_starts_and_says_so() -> None:
    history = History()
    assert history.play(FleetSeen(True, ("http://b down",))) == [CleanFleet()]
    assert history.said == ["going on without http://b down"]


@pytest.mark.parametrize(
    ("event", "code"), [(CleanRefused("busy"), 2), (CleanFailed("status 500: oh"), 1)]
)
def test_a_fleet_that_is_not_clean_never_sees_the_trainer(event: Event, code: int) -> None:
    history = History()
    history.play(FleetSeen(True))
    assert history.play(event) == [StopDaemon()]
    assert history.play(Cleaned()) == []
    assert history.play(DaemonDied(0)) == [Exit(code)]


def test_a_cleaning_that_was_cut_off_waits_and_cleans_again_a_few_times() -> None:
    history = History()
    for _ in range(sup.MAX_CLEANS - 1):
        assert history.play(FleetSeen(True)) == [CleanFleet()]
        assert history.play(CleanUnanswered("reset")) == [WatchFleet()]
    assert history.play(FleetSeen(True), CleanUnanswered("reset")) == [StopDaemon()]


@pytest.mark.parametrize("first_seen", ["death", "cut off"])
def test_a_daemon_that_dies_while_cleaning_is_restarted_and_cleans_once_more(
    first_seen: str,
) -> None:
    history = History()
    history.play(FleetSeen(True))
    events: list[Event] = [DaemonDied(-9), CleanUnanswered("reset")]
    history.play(*(events if first_seen == "death" else reversed(events)))
    assert history.state.phase is Phase.WAITING
    assert history.state.daemon_up
    assert history.play(FleetSeen(True)) == [CleanFleet()]


def test_cleaning_has_an_end() -> None:
    history = History()
    history.play(FleetSeen(True))
    assert history.to_deadline() == [StopDaemon()]
    assert history.play(DaemonDied(0)) == [Exit(1)]


def test_three_restarts_then_the_trainer_is_stopped_and_the_code_is_1() -> None:
    history = History.training()
    for _ in range(3):
        assert history.play(DaemonDied(-9), after_s=10) == [StartDaemon()]
    assert history.play(DaemonDied(-11), after_s=10) == [SignalTrainer(Signals.SIGTERM, False)]
    assert "died of SIGSEGV, the 4th time in 10 minutes" in history.said[-1]
    assert history.play(Tick(), after_s=19.9) == []
    assert history.play(Tick(), after_s=0.1) == [KillTrainer()]
    assert history.play(TrainerExited(-9)) == [SweepTrainer()]
    assert history.play(NoneLeft()) == [Exit(1)]


def test_code_1_stands_even_if_the_stopped_trainer_ends_well() -> None:
    history = History.training()
    history.play(*[DaemonDied(1)] * 4, TrainerExited(0))
    assert history.play(NoneLeft()) == [Exit(1)]


def test_restarts_long_ago_do_not_count() -> None:
    history = History.training()
    for _ in range(50):
        assert history.play(DaemonDied(1), after_s=200.1) == [StartDaemon()]
    assert len(history.state.restarts) == sup.MAX_RESTARTS


def test_a_daemon_that_refuses_its_settings_is_not_restarted() -> None:
    assert History().play(DaemonDied(2)) == [Exit(2)]


def test_code_2_later_on_is_a_death_like_any_other() -> None:
    assert History.training().play(DaemonDied(2)) == [StartDaemon()]


def test_a_daemon_that_cannot_stay_up_ends_the_start() -> None:
    history = History()
    for _ in range(3):
        assert history.play(DaemonDied(1)) == [StartDaemon()]
    assert history.play(DaemonDied(1)) == [Exit(1)]


def test_sigterm_reaches_the_trainer_and_everything_is_gone_in_drain_plus_5() -> None:
    history = History.training(drain_s=20)
    assert history.play(TERM) == [SignalTrainer(Signals.SIGTERM, group=False)]
    began_s = history.now_s
    assert history.to_deadline() == [KillTrainer()]
    assert history.now_s == began_s + 20
    history.play(TrainerExited(-9), NoneLeft())
    assert history.did == [ReleaseFleet()]
    assert history.to_deadline() == [StopDaemon()]
    assert history.to_deadline() == [KillDaemon()]
    assert history.now_s == began_s + 25
    assert history.play(DaemonDied(-9)) == [Exit(137)]


def test_a_trainer_that_ends_in_time_after_sigterm_gives_its_own_code() -> None:
    history = History.training()
    history.play(TERM, TrainerExited(3), NoneLeft(), Released())
    assert history.play(DaemonDied(0)) == [Exit(3)]


def test_a_second_sigterm_is_passed_on_and_does_not_prolong_the_first() -> None:
    history = History.training()
    history.play(TERM)
    deadline_s = history.state.deadline_s
    assert history.play(TERM, after_s=5) == [SignalTrainer(Signals.SIGTERM, group=False)]
    assert history.state.deadline_s == deadline_s


def test_leftovers_get_the_rest_of_a_stopped_trainers_time() -> None:
    history = History.training(drain_s=20)
    history.play(TERM)
    began_s = history.now_s
    history.play(TrainerExited(-15), after_s=1)
    assert history.to_deadline() == [KillTrainer()]
    assert history.now_s == began_s + 20


def test_leftovers_of_an_ordinary_end_get_a_few_seconds() -> None:
    history = History.training()
    history.play(TrainerExited(0))
    exited_s = history.now_s
    assert history.to_deadline() == [KillTrainer()]
    assert history.now_s == exited_s + sup.LEFTOVER_S
    assert history.to_deadline() == [ReleaseFleet()], "what cannot be killed is not waited for"


def test_sigint_has_no_clock_the_second_asks_firmly_and_the_third_kills() -> None:
    history = History.training()
    assert history.play(INT) == [SignalTrainer(Signals.SIGINT, group=True)]
    assert history.state.deadline_s is None
    assert history.play(INT) == [SignalTrainer(Signals.SIGTERM, group=True)]
    assert history.state.deadline_s == history.now_s + sup.ESCALATE_S
    assert history.play(INT) == [KillTrainer()]


def test_second_sigint_alone_kills_when_its_clock_is_over() -> None:
    history = History.training()
    history.play(INT, INT)
    assert history.to_deadline() == [KillTrainer()]


def test_sigints_after_sigterm_shorten_the_end() -> None:
    history = History.training(drain_s=100)
    history.play(TERM, INT, INT)
    assert history.state.deadline_s == history.now_s + sup.ESCALATE_S


def test_sigints_after_sigterm_never_prolong_the_end() -> None:
    history = History.training(drain_s=2)
    history.play(TERM, INT, INT)
    assert history.state.deadline_s == history.now_s + 2
    assert history.state.stop_by_s == history.now_s + 2 + sup.STOP_SLACK_S


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_other_signals_are_only_passed_on(name: str) -> None:
    history = History.training()
    signal = Signals[name]
    assert history.play(Signalled(signal)) == [SignalTrainer(signal, group=False)]
    assert history.state.deadline_s is None
    waiting = History()
    assert waiting.play(Signalled(signal)) == []
    assert waiting.state.phase is Phase.WAITING


@pytest.mark.parametrize(("event", "code"), [(TERM, 143), (INT, 130)])
@pytest.mark.parametrize("cleaning", [False, True])
def test_a_signal_before_the_trainer_ends_the_start(
    event: Event, code: int, cleaning: bool
) -> None:
    history = History()
    if cleaning:
        history.play(FleetSeen(True))
    assert history.play(event) == [StopDaemon()]
    assert history.play(DaemonDied(0)) == [Exit(code)]


def test_a_daemon_that_will_not_stop_is_killed_and_then_not_waited_for() -> None:
    history = History.training(drain_s=20)
    history.play(TrainerExited(0), NoneLeft(), Released())
    began_s = history.now_s
    assert history.to_deadline() == [KillDaemon()]
    assert history.now_s == began_s + 25
    assert history.to_deadline() == [Exit(0)]


def test_second_sigint_ends_a_daemon_that_drains() -> None:
    history = History.training()
    history.play(TrainerExited(0), NoneLeft(), Released())
    assert history.play(INT) == []
    assert history.play(INT) == [KillDaemon()]


def test_sigterm_while_draining_shortens_the_drain() -> None:
    history = History.training(drain_s=2)
    history.play(TERM, TrainerExited(0), after_s=0)
    by_s = history.now_s + 2 + sup.STOP_SLACK_S
    history.play(NoneLeft(), Released(), after_s=1)
    assert history.state.deadline_s == by_s


def test_the_fleet_is_kept_until_the_trainers_files_are_in_the_bucket() -> None:
    history = History.training(flush=True)
    assert history.play(TrainerExited(3), NoneLeft()) == [WatchFlush()]
    assert history.play(FlushSeen(False, "2 of 3 files"), FlushSeen(False, "2 of 3 files")) == []
    assert history.said.count("2 of 3 files") == 1
    assert history.play(FlushSeen(True, "all 3 files"), after_s=5) == [ReleaseFleet()]
    assert history.play(Released()) == [StopDaemon()]
    assert history.play(DaemonDied(0)) == [Exit(3)]


def test_a_bucket_that_never_lists_them_is_given_up_after_a_minute_and_said() -> None:
    history = History.training(flush=True)
    began_s = history.now_s
    history.play(TrainerExited(0), NoneLeft(), FlushSeen(False, "2 of 3 files"))
    assert history.to_deadline() == [ReleaseFleet()]
    assert history.now_s == began_s + 60
    assert "not everything reached the bucket in time: 2 of 3 files" in history.said


def test_a_clock_shortens_the_wait_for_the_bucket() -> None:
    history = History.training(flush=True)
    history.play(TERM, TrainerExited(0), NoneLeft())
    assert history.state.deadline_s == history.now_s + 20
    late = History.training(flush=True)
    late.play(TrainerExited(0), NoneLeft(), TERM)
    assert late.state.deadline_s == late.now_s + 20


def test_sigint_ends_the_wait_for_the_bucket() -> None:
    history = History.training(flush=True)
    history.play(TrainerExited(0), NoneLeft())
    assert history.play(INT) == [ReleaseFleet()]


def test_a_daemon_that_dies_while_the_bucket_is_waited_for_is_restarted_and_asked_again() -> None:
    history = History.training(flush=True)
    history.play(TrainerExited(5), NoneLeft())
    for _ in range(sup.MAX_RESTARTS):
        assert history.play(DaemonDied(-9)) == [StartDaemon()]
    assert history.play(DaemonDied(-9)) == [Exit(5)], "the trainer's code stands"


def test_a_failed_resume_is_said_and_does_not_stop_the_end() -> None:
    history = History.training()
    history.play(TrainerExited(0), NoneLeft())
    assert history.play(Released("status 500")) == [StopDaemon()]
    assert "status 500" in history.said[-1]


def test_a_daemon_that_dies_while_the_trainer_ends_is_restarted_to_resume_the_fleet() -> None:
    history = History.training()
    history.play(TrainerExited(0))
    assert history.play(DaemonDied(-9)) == [StartDaemon()]
    assert history.play(NoneLeft()) == [ReleaseFleet()]


def test_a_daemon_that_dies_while_resuming_ends_it() -> None:
    history = History.training()
    history.play(TrainerExited(4), NoneLeft())
    assert history.play(DaemonDied(-9)) == [Exit(4)]


def test_a_command_that_cannot_be_run_is_bad_usage() -> None:
    history = History.training()
    assert history.play(TrainerNotStarted("no such interpreter")) == [StopDaemon()]
    assert history.play(DaemonDied(0)) == [Exit(2)]


def test_nothing_matters_after_the_end() -> None:
    history = History()
    history.play(DaemonDied(2))
    assert history.play(TERM, INT, FleetSeen(True), DaemonDied(0), Tick()) == []
    assert history.state.deadline_s is None


def test_a_follower_has_no_daemon_waits_and_runs() -> None:
    history = History(leads=False)
    assert history.did == [WatchFleet()]
    assert history.play(FleetSeen(True)) == [StartTrainer()]
    assert history.play(TrainerExited(5)) == [SweepTrainer()]
    assert history.play(NoneLeft()) == [Exit(5)]


def test_a_follower_without_a_leader_gives_up() -> None:
    history = History(leads=False)
    history.play(FleetSeen(False, ("the daemon at http://node0:8000 (refused)",)))
    assert history.to_deadline() == [Exit(1)]
    assert "http://node0:8000" in history.said[-1]


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, in whatever order: one trainer, a bounded daemon, a bounded way out."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.daemon = self.trainer = False
        self.daemon_starts: list[float] = []
        self.trainer_starts = 0
        self.clocked_s: float | None = None
        self.exit: int | None = None
        self.limits = Limits(start_timeout_s=30.0, drain_s=10.0, flush=True)
        self.state: State
        self.state, commands = sup.begin(self.limits, 0.0)
        self.carry_out(commands)

    def carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            assert self.exit is None, "nothing comes after the exit"
            match command:
                case StartDaemon():
                    assert not self.daemon
                    self.daemon = True
                    self.daemon_starts.append(self.now_s)
                case StartTrainer():
                    self.trainer = True
                    self.trainer_starts += 1
                case SignalTrainer():
                    assert self.trainer
                case StopDaemon() | KillDaemon() | CleanFleet() | ReleaseFleet() | WatchFlush():
                    assert self.daemon
                case Exit():
                    self.exit = command.code

    def play(self, event: Event) -> None:
        self.state, commands = sup.step(self.state, event, self.now_s)
        self.carry_out(commands)

    @rule(
        event=st.sampled_from(
            [
                FleetSeen(True),
                FleetSeen(False, ("b",)),
                Cleaned(),
                CleanRefused("busy"),
                CleanFailed("500"),
                CleanUnanswered("reset"),
                NoneLeft(),
                FlushSeen(False, "2 of 3 files"),
                FlushSeen(True, "all 3 files"),
                Released(),
                Released("500"),
                INT,
                Signalled(Signals.SIGUSR1),
                Tick(),
            ]
        )
    )
    def something_happens(self, event: Event) -> None:
        self.play(event)

    @rule(name=st.sampled_from(["SIGTERM", "SIGHUP", "SIGQUIT"]))
    def told_to_stop(self, name: str) -> None:
        if self.clocked_s is None and self.exit is None:
            self.clocked_s = self.now_s
        self.play(Signalled(Signals[name]))

    @precondition(lambda self: self.daemon)
    @rule(code=st.sampled_from([0, 1, 2, -9]))
    def daemon_dies(self, code: int) -> None:
        self.daemon = False
        self.play(DaemonDied(code))

    @precondition(lambda self: self.trainer)
    @rule(code=st.sampled_from([0, 7, -15]))
    def trainer_ends(self, code: int) -> None:
        self.trainer = False
        self.play(TrainerExited(code))

    @rule(seconds=st.sampled_from([0.1, 1.0, 9.0, 40.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.state.deadline_s is not None and self.state.deadline_s <= end_s:
            self.now_s = max(self.now_s, self.state.deadline_s)
            self.play(Tick())
        self.now_s = end_s

    @invariant()
    def one_trainer_at_most(self) -> None:
        assert self.trainer_starts <= 1

    @invariant()
    def daemon_starts_are_bounded(self) -> None:
        recent = [t for t in self.daemon_starts[1:] if self.now_s - t < sup.RESTART_WINDOW_S]
        assert len(recent) <= sup.MAX_RESTARTS

    @invariant()
    def the_way_out_has_an_end(self) -> None:
        if self.state.phase is not Phase.TRAINING and self.exit is None:
            assert self.state.deadline_s is not None
        if self.clocked_s is not None and self.exit is None:
            # whatever cannot even be killed: the trainer, its leftovers, the daemon
            slack_s = sup.STOP_SLACK_S + 3 * sup.KILL_WAIT_S
            assert self.now_s - self.clocked_s <= self.limits.drain_s + slack_s

    @invariant()
    def exit_is_final_and_says_so(self) -> None:
        assert (self.exit is not None) == (self.state.phase is Phase.DONE)


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_any_history = AnyHistory.TestCase

"""One contract for every policy there is, and the contract's own teeth."""

from collections.abc import Callable

import pytest

from routing import contract, registry
from routing.ids import ReplicaId
from routing.least_loaded import LeastLoaded
from routing.prefix import Prefix
from routing.router import Decision, NoReplica, RouterSettings


@pytest.mark.parametrize("name", [info.name for info in registry.installed()])
def test_policy_keeps_the_contract(name: str) -> None:
    assert contract.check(registry.factory(name)) == []


class Keeper(LeastLoaded):
    name = "keeper"


class PicksExcluded(Keeper):
    def choose(self, request, candidates, now_s):
        return Decision(candidates[0].id, "first") if candidates else NoReplica()


class PicksStranger(Keeper):
    def choose(self, request, candidates, now_s):
        decision = super().choose(request, candidates, now_s)
        return decision if isinstance(decision, NoReplica) else Decision(ReplicaId("x"), "strange")


class Monopolist(Keeper):
    def choose(self, request, candidates, now_s):
        left = [load for load in candidates if load.id not in request.exclude]
        return Decision(left[0].id, "first") if left else NoReplica()


class Choosy(Keeper):
    def choose(self, request, candidates, now_s):
        sum(request.prompt)
        return super().choose(request, candidates, now_s)


class Raiser(Keeper):
    def choose(self, request, candidates, now_s):
        raise RuntimeError("no luck")


class Asynchronous(Keeper):
    async def choose(self, request, candidates, now_s):
        return NoReplica()


class Awaitable(Keeper):
    def choose(self, request, candidates, now_s):
        async def later() -> NoReplica:
            return NoReplica()

        return later()


class Counting(Keeper):
    def choose(self, request, candidates, now_s):
        decision = super().choose(request, candidates, now_s)
        for load in candidates:
            load.inflight += 1
        return decision


class ShoutsReason(Keeper):
    def choose(self, request, candidates, now_s):
        decision = super().choose(request, candidates, now_s)
        return decision if isinstance(decision, NoReplica) else Decision(decision.replica, "Least!")


class Boasts(Keeper):
    def choose(self, request, candidates, now_s):
        decision = super().choose(request, candidates, now_s)
        return (
            decision
            if isinstance(decision, NoReplica)
            else Decision(decision.replica, "affinity", 9, 1)
        )


class AnswersNone(Keeper):
    def choose(self, request, candidates, now_s):
        decision = super().choose(request, candidates, now_s)
        return None if isinstance(decision, NoReplica) else decision


class Hoarder(Prefix):
    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(RouterSettings(max_tracked_blocks=10_000))


class Forgetless(Prefix):
    def forget_all(self) -> None:
        return None


class Finicky(Keeper):
    def forget_adapter(self, model: str) -> None:
        raise KeyError(model)


class Unseeded(Keeper):
    made = 0

    def __init__(self, settings: RouterSettings) -> None:
        type(self).made += 1
        super().__init__(RouterSettings(seed=self.made))


class Nameless(Keeper):
    name = "No Name"


class Half:
    name = "half"
    tracked_blocks = 0

    def __init__(self, settings: RouterSettings) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (PicksExcluded, "is excluded"),
        (PicksStranger, "picks 'x', which is no candidate"),
        (Monopolist, "were spread [200, 0, 0, 0]"),
        (Choosy, "raised TypeError"),
        (Raiser, "raised RuntimeError: no luck"),
        (Asynchronous, "choose is async"),
        (Awaitable, "returns an awaitable"),
        (Counting, "changes the candidates"),
        (ShoutsReason, "no lower-case word"),
        (Boasts, "matched_blocks 9 of total_blocks 1"),
        (AnswersNone, "not NoReplica()"),
        (Hoarder, "where max_tracked_blocks is 64"),
        (Forgetless, "after forget_all"),
        (Finicky, "raised KeyError"),
        (Unseeded, "decide differently"),
        (Nameless, "its name is no lower-case word"),
        (Half, "has no method choose"),
    ],
)
def test_a_broken_policy_is_told_what_it_breaks(broken: Callable, words: str) -> None:
    violations = contract.check(broken)
    assert any(words in violation for violation in violations), violations


def test_a_factory_that_fails_is_a_violation() -> None:
    def factory(settings: RouterSettings) -> LeastLoaded:
        raise OSError("no disk")

    assert any("raised OSError: no disk" in violation for violation in contract.check(factory))

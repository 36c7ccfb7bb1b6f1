# SPDX-License-Identifier: Apache-2.0
"""Which Gym a check is judged in, and that two Gyms are judged at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import registry, session
from conformance.bench import Bench
from conformance.case import Case
from conformance.errors import TargetUnreachable, UsageError
from conformance.machine_checks import MACHINE_CHECKS
from conformance.patience import Patience
from conformance.registry import Check
from conformance.runner import Runner, Settings
from conformance.session import Session, pays, sides
from conformance.target_file import TargetFile
from conformance.verdict import Outcome
from conformance.wire import Wire
from conformance.witness import Witness
from conformance.world import World
from spec import load

MEET_WITHIN_S = 10.0


def check(body: Callable[[Case], None], **changed: Any) -> Check:
    """A check with a body."""
    fields: dict[str, Any] = {"profile": "results", "each": "gym", "level": 0, "features": (), "budgets": ("default",)}
    fields |= {"needs_world": False, "needs_storage": False, "needs_shared_dir": False, **changed}
    return Check(name=body.__name__, chapter="lifecycle", requirements=("CKPT-A-001",), body=body, **fields)


class Place:
    """Opens benches on which nothing is called; the second one may not start."""

    def __init__(self, make: Callable[[Any], Bench], *, alone: bool, second: bool) -> None:
        self.benches: list[Bench] = []
        self._make, self._alone, self._second = make, alone, second

    @contextmanager
    def open(self, settings: Settings, specification: object) -> Iterator[Bench]:
        """Stands in for `open_bench`."""
        if self.benches and not self._second:
            raise TargetUnreachable("the port is taken")
        self.benches.append(self._make(SimpleNamespace(level=1, shared_dir=None, alone=self._alone)))
        yield self.benches[-1]


@pytest.fixture
def place(
    witness: Witness, world: World, patience: Patience, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Place]]:
    """Makes a place where benches are opened."""
    wire = Wire(None, patience)

    def make(target: Any) -> Bench:
        gym: Any = SimpleNamespace(participants=[], profiles={"results"}, features=set(), environments=dict)
        gym.controller = lambda name: None
        return Bench(load(), target, gym, wire, witness, world, patience, "c0", False, tmp_path)

    def opened(*, alone: bool = False, second: bool = True) -> Place:
        found = Place(make, alone=alone, second=second)
        monkeypatch.setattr(session, "open_bench", found.open)
        return found

    yield opened
    wire.close()


def run(checks: list[Check], tell: Callable[[Outcome], object] = lambda outcome: None) -> Session:
    """Run checks without the machine."""
    return session.run(Settings(), load(), checks, [], lambda bench: None, lambda outcome, secrets: tell(outcome))


def test_what_needs_the_process_owns_a_gym_and_what_comes_last_is_in_both() -> None:
    """All checks are judged somewhere, and two Gyms are worth it only if both have something of their own."""

    def low(case: Case) -> None: ...

    def high(case: Case) -> None: ...

    def end(case: Case) -> None: ...

    one, two, three = check(low), check(high, level=2), check(end, level=1, last=True)
    found = sides([one, two, three])
    assert ((one, three), (two, three)) == (found.shared, found.owned)
    assert [True, False, False, False] == [pays(sides(s), []) for s in ([one, two], [one, three], [two, three], [one])]
    assert pays(sides([one]), MACHINE_CHECKS[:1])
    assert not pays(sides([]), MACHINE_CHECKS)
    whole = sides(list(registry.all_checks().values()))
    assert registry.all_checks().keys() == {check.name for check in (*whole.shared, *whole.owned)}


def test_two_gyms_are_judged_at_once(place: Callable[..., Place]) -> None:
    """A check of level 0 and one of level 1 meet; each is in a Gym of its own."""
    gyms = place()
    both, seen = threading.Barrier(2), dict[str, Bench]()

    def low(case: Case) -> None:
        seen["low"] = case.bench
        both.wait(MEET_WITHIN_S)

    def high(case: Case) -> None:
        seen["high"] = case.bench
        both.wait(MEET_WITHIN_S)

    found = run([check(low), check(high, level=1)])
    assert ["passed", "passed"] == [outcome.status for outcome in found.outcomes]
    assert (gyms.benches[0], gyms.benches[1]) == (seen["low"], seen["high"])
    assert gyms.benches[0].gym is found.gym


def test_a_gym_that_is_alone_is_judged_alone(place: Callable[..., Place]) -> None:
    """One Gym, one check after the other, in the order of the run."""
    gyms, seen = place(alone=True), list[str]()

    def high(case: Case) -> None:
        seen.append(case.name)

    def low(case: Case) -> None:
        seen.append(case.name)

    run([check(low), check(high, level=1)])
    assert (1, ["low", "high"]) == (len(gyms.benches), seen)


def test_a_second_gym_that_does_not_start_ends_the_run(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check that runs in the first one comes to its end, no further one begins."""
    place(second=False)
    stopped, seen = threading.Event(), list[str]()
    stop = Runner.stop
    monkeypatch.setattr(Runner, "stop", lambda self: (stop(self), stopped.set()))

    def low(case: Case) -> None:
        seen.append(case.name)
        assert stopped.wait(MEET_WITHIN_S)

    def lower(case: Case) -> None:
        seen.append(case.name)

    with pytest.raises(TargetUnreachable, match="the port is taken"):
        run([check(low), check(lower), check(low, level=1)])
    assert ["low"] == seen


@pytest.mark.parametrize(("more", "alone"), [("", False), ("alone: true", True), ("shared_dir: /srv", True)])
def test_a_target_file_says_whether_there_can_be_two(tmp_path: Path, more: str, alone: bool) -> None:
    """Of a directory that the file names there is one; otherwise `alone` says it."""
    file = tmp_path / "target.yaml"
    file.write_text(f"start: [my-gym]\n{more}\n")
    assert alone == TargetFile.read(file).alone
    file.write_text("start: [my-gym]\nalnoe: true\n")
    with pytest.raises(UsageError):
        TargetFile.read(file)

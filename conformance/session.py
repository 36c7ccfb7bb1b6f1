# SPDX-License-Identifier: Apache-2.0
"""One run: which Gym each check is judged in, and what came of them all.

Where the suite starts the Gym itself, it starts two from one target file: the checks of level 0 share one, those that
end the process own the other, and so does the state machine, which empties it again and again. Both run at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.bench import Bench
from conformance.errors import TargetUnreachable
from conformance.gym import Gym
from conformance.registry import Check
from conformance.runner import Runner, Settings, open_bench
from conformance.target import ProcessTarget
from conformance.verdict import Outcome
from spec import Specification

if TYPE_CHECKING:
    from conformance.machine_run import MachineReport

Told = Callable[[Outcome, tuple[str, ...]], None]


@dataclass(frozen=True)
class Sides:
    """Which checks share a Gym, and which own one.

    Args:
        shared: judged in the first Gym, one after the other.
        owned: judged in the second one, one after the other, before the state machine.
    """

    shared: tuple[Check, ...]
    owned: tuple[Check, ...]


def sides(checks: Sequence[Check]) -> Sides:
    """Return where each check is judged; one that judges what the others leave behind is judged in both Gyms."""
    shared = tuple(check for check in checks if check.last or not check.level)
    return Sides(shared, tuple(check for check in checks if check.last or check.level))


def pays(found: Sides, parts: Sequence[Check]) -> bool:
    """Say whether there is something to do for two Gyms at once."""
    return any(not check.last for check in found.shared) and bool(parts or any(not c.last for c in found.owned))


@dataclass(frozen=True)
class Session:
    """What a run saw.

    Args:
        gym: the one under test (the first, where there were two).
        outcomes: of every check, those of the machine last.
        machine: what the machine visited; None if it did not run.
        gone: the check during which a Gym ended that is not ours to start again, or None.
        secrets: what must not be shown.
    """

    gym: Gym
    outcomes: Sequence[Outcome]
    machine: MachineReport | None
    gone: str | None
    secrets: tuple[str, ...]


def run(
    settings: Settings,
    specification: Specification,
    checks: Sequence[Check],
    parts: Sequence[Check],
    on_begin: Callable[[Bench], None],
    on_outcome: Told,
) -> Session:
    """Judge a Gym by these checks and these parts of the state machine.

    Args:
        settings: what the run is told.
        specification: what is judged by.
        checks: in the order in which they are run.
        parts: of the machine.
        on_begin: called with the first bench.
        on_outcome: called after each check, with the secrets that must not be shown.

    Raises:
        TargetUnreachable: no Gym is there, or the second one does not start.
    """
    with open_bench(settings, specification) as bench:
        on_begin(bench)
        found = sides(checks)
        if bench.target.alone or not pays(found, parts):
            return _one_after_the_other(bench, settings, checks, parts, on_outcome)
        return _two_at_once(bench, settings, found, parts, on_outcome)


def _one_after_the_other(
    bench: Bench, settings: Settings, checks: Sequence[Check], parts: Sequence[Check], on_outcome: Told
) -> Session:
    runner = _runner(bench, on_outcome)
    outcomes = list(runner.run(checks))
    machine = _machine(bench, settings, parts) if parts and runner.gone is None else None
    return _session(bench, outcomes, machine, runner.gone, _secrets(bench))


def _two_at_once(bench: Bench, settings: Settings, found: Sides, parts: Sequence[Check], on_outcome: Told) -> Session:
    runner = _runner(bench, on_outcome)
    with ThreadPoolExecutor(1, thread_name_prefix="conformance-shared") as beside:
        shared = beside.submit(runner.run, found.shared)
        try:
            with _second_bench(settings, bench.spec) as own:
                outcomes = list(_runner(own, on_outcome).run(found.owned))
                machine = _machine(own, settings, parts) if parts else None
                secrets = (*_secrets(bench), *_secrets(own))
        except BaseException:
            runner.stop()
            raise
        return _session(bench, [*shared.result(), *outcomes], machine, None, secrets)


@contextmanager
def _second_bench(settings: Settings, specification: Specification) -> Iterator[Bench]:
    with ExitStack() as stack:
        try:
            bench = stack.enter_context(open_bench(settings, specification))
        except TargetUnreachable as error:
            hint = "where two of them cannot run at once, target.yaml says `alone: true`"
            raise TargetUnreachable(f"the second Gym of this run: {error}; {hint}") from error
        yield bench


def _runner(bench: Bench, on_outcome: Told) -> Runner:
    secrets = _secrets(bench)
    return Runner(bench, lambda outcome: on_outcome(outcome, secrets))


def _session(
    bench: Bench,
    outcomes: Sequence[Outcome],
    machine: MachineReport | None,
    gone: str | None,
    secrets: tuple[str, ...],
) -> Session:
    judged = (*outcomes, *(machine.outcomes if machine is not None else ()))
    return Session(bench.gym, judged, machine, gone, secrets)


def _secrets(bench: Bench) -> tuple[str, ...]:
    own = bench.target.secrets if isinstance(bench.target, ProcessTarget) else ()
    return (*bench.wire.tokens.values(), *own)


def _machine(bench: Bench, settings: Settings, parts: Sequence[Check]) -> MachineReport:
    """Run the parts of the state machine; it is imported late, because the other commands do not need it."""
    module = importlib.import_module("conformance.machine")
    report: MachineReport = module.run(bench, seed=settings.seed, budget=settings.budget, parts=parts)
    return report

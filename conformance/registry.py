# SPDX-License-Identifier: Apache-2.0
"""The registry of checks: each is a function that reads as a story, registered with the requirements it exercises."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from conformance.errors import SuiteFault
from conformance.failpoints import MOMENTS

if TYPE_CHECKING:
    from conformance.case import Case

Body = Callable[["Case"], None]
Each = Literal["gym", "participant", "rollouts", "sessions"]
Budget = Literal["quick", "demo", "default"]

PROFILES = ("results", "checkpoint", "turn-recovery")


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: the function's name; what requirements list under `checks:`.
        chapter: the file it is in.
        requirements: the requirement ids that it exercises; the first is its main subject.
        profile: the profile that it belongs to.
        each: `gym`: once; `participant`: for each; `rollouts`, `sessions`: for each participant that owns them.
        level: the target level that it needs.
        features: the features that it needs.
        needs_world: whether the conformance environment must call the suite's world.
        needs_storage: whether snapshots must be reachable (a shared directory, or http artifacts).
        needs_shared_dir: whether a directory that both sides see is needed.
        points: the fail points that it needs (level 2), by the suite's names.
        last: whether it judges what the other checks leave behind: it runs after them, in every Gym of the run.
        budgets: the budgets in which it runs.
        body: the function.
    """

    name: str
    chapter: str
    requirements: tuple[str, ...]
    profile: str
    each: Each
    level: int
    features: tuple[str, ...]
    needs_world: bool
    needs_storage: bool
    needs_shared_dir: bool
    budgets: tuple[Budget, ...]
    body: Body
    points: tuple[str, ...] = ()
    last: bool = False

    @property
    def sentence(self) -> str:
        """The first line of its docstring."""
        return (self.body.__doc__ or self.name).strip().splitlines()[0]


MACHINE = "machine"
"""The chapter of the checks that the state machine judges; the runner does not call them."""

_CHECKS: dict[str, Check] = {}


def check(
    *requirements: str,
    profile: str = "results",
    each: Each = "gym",
    level: int = 0,
    features: tuple[str, ...] = (),
    world: bool = False,
    storage: bool = False,
    shared_dir: bool = False,
    points: tuple[str, ...] = (),
    last: bool = False,
    budget: Budget | tuple[Budget, ...] = "default",
) -> Callable[[Body], Body]:
    """Register a function as a check; see `Check` for the arguments.

    A check with `points` is one of level 2.
    `budget="quick"` runs in quick and default; add `"demo"` for the demo's choice. All run in default.
    """

    def wrap(body: Body) -> Body:
        chosen = (budget,) if isinstance(budget, str) else budget
        register(
            Check(
                name=body.__name__,
                chapter=body.__module__.rpartition(".")[2],
                requirements=requirements,
                profile=profile,
                each=each,
                level=max(level, 2) if points else level,
                features=features,
                needs_world=world,
                needs_storage=storage or shared_dir,
                needs_shared_dir=shared_dir,
                budgets=tuple(dict.fromkeys([*chosen, "default"])),
                body=body,
                points=points,
                last=last,
            )
        )
        return body

    return wrap


def register(check: Check) -> None:
    """Put a check into the registry.

    Raises:
        SuiteFault: another check has its name, or its profile is unknown.
    """
    if check.name in _CHECKS and _CHECKS[check.name].body is not check.body:
        raise SuiteFault(f"two checks are called {check.name}")
    if check.profile not in PROFILES:
        raise SuiteFault(f"{check.name}: unknown profile {check.profile}")
    if not set(check.points) <= set(MOMENTS):
        raise SuiteFault(f"{check.name}: unknown fail points {sorted(set(check.points) - set(MOMENTS))}")
    _CHECKS[check.name] = check


def all_checks() -> Mapping[str, Check]:
    """Return every check that the runner calls, by name, in the order of chapters and of the functions in them."""
    package = importlib.import_module("conformance.checks")
    for module in sorted(found.name for found in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"conformance.checks.{module}")
    return {name: check for name, check in _CHECKS.items() if check.chapter != MACHINE}


def every_check() -> Mapping[str, Check]:
    """Return every check by name, those included whose judgements the state machine makes."""
    called = all_checks()
    importlib.import_module("conformance.machine_run")
    return {**called, **{name: check for name, check in _CHECKS.items() if check.chapter == MACHINE}}

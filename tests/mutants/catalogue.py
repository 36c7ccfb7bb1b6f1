# SPDX-License-Identifier: Apache-2.0
"""The mutants by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.mutants import broken, seam

CLEAN = "clean"
"""The name of the unmutated Gym, which belongs to every run as its control."""

Shows = Literal["answer", "state", "race", "crash"]
"""What it takes to see a mutant: one call whose answer is wrong; a sequence of calls that leads to a certain state;
things that happen at the same time; an end of the process."""


@dataclass(frozen=True)
class Mutant:
    """One broken Gym.

    Args:
        name: of its module.
        sentence: what it breaks.
        breaks: requirement ids, the main one first.
        targets: the area.
        shows: what it takes to see it.
        from_the_text: whether it was written from the specification by somebody who had read no check of its chapter.
        log: whether it breaks a Gym that keeps a boundary log, and no other.
        apply: changes the reference Gym in this process.
    """

    name: str
    sentence: str
    breaks: tuple[str, ...]
    targets: str
    shows: Shows
    from_the_text: bool
    log: bool
    apply: Callable[[], None]


def mutants() -> Mapping[str, Mutant]:
    """Return all mutants by name."""
    return {
        found.name: load(found.name) for found in sorted(pkgutil.iter_modules(broken.__path__), key=lambda m: m.name)
    }


def load(name: str) -> Mutant:
    """Return one mutant.

    Raises:
        LookupError: there is none of that name.
    """
    try:
        module = importlib.import_module(f"{broken.__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{broken.__name__}.{name}":
            raise  # It does not fit the reference Gym any more.
        raise LookupError(f"there is no mutant {name}") from error
    sentence = " ".join((module.__doc__ or "").strip().split("\n\n")[0].split())
    return Mutant(
        name=name,
        sentence=sentence,
        breaks=tuple(module.BREAKS),
        targets=module.TARGETS,
        shows=module.SHOWS,
        from_the_text=getattr(module, "FROM_THE_TEXT", False),
        log=getattr(module, "LOG", False),
        apply=module.apply,
    )


def apply(name: str) -> None:
    """Change the reference Gym in this process; the control changes nothing.

    Raises:
        LookupError: there is no such mutant.
        seam.NoSeam: it does not fit the reference Gym any more, or changes nothing.
    """
    if name == CLEAN:
        return
    before = seam.wrapped()
    load(name).apply()
    if seam.wrapped() == before:
        raise seam.NoSeam(f"{name} changes nothing")

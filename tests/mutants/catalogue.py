# SPDX-License-Identifier: Apache-2.0
"""The mutants by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.mutants import broken, seam

CLEAN = "clean"
"""The name of the unmutated Gym, which belongs to every run as its control."""


@dataclass(frozen=True)
class Mutant:
    """One broken Gym.

    Args:
        name: of its module.
        sentence: what it breaks.
        breaks: requirement ids, the main one first.
        targets: the area.
        apply: changes the reference Gym in this process.
    """

    name: str
    sentence: str
    breaks: tuple[str, ...]
    targets: str
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
    return Mutant(name, sentence, tuple(module.BREAKS), module.TARGETS, module.apply)


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

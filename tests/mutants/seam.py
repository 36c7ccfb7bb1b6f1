# SPDX-License-Identifier: Apache-2.0
"""How a mutant reaches into the reference Gym: one wrapped method at a time, and never silently beside it.

A name that its owner does not define any more, or whose parameters are not those that the mutant was written for, is an
error: a mutant that no longer breaks anything would otherwise look like one that the suite missed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Function = Callable[..., Any]

_undo: list[tuple[Any, str, Any]] = []


class NoSeam(Exception):
    """The reference Gym has changed, and the mutant does not fit it any more."""


def wrap(owner: Any, name: str) -> Callable[[Function], Function]:
    """Replace a method of a class, or a function of a module, by one that gets the original as its first argument.

    Args:
        owner: the class or module that itself defines the name.
        name: a function, method, classmethod or property.

    Raises:
        NoSeam: the name is not defined there, or has other parameters than the replacement names.
    """
    place = f"{owner.__name__}.{name}"
    if name not in vars(owner):
        raise NoSeam(f"{place} is not defined any more")
    found = vars(owner)[name]
    original = (
        found.fget if isinstance(found, property) else found.__func__ if isinstance(found, classmethod) else found
    )
    if not inspect.isfunction(original):
        raise NoSeam(f"{place} is no function any more")

    def decorate(replacement: Function) -> Function:
        _require_same_parameters(place, original, replacement)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        kind = type(found) if isinstance(found, property | classmethod) else None
        _undo.append((owner, name, found))
        setattr(owner, name, replaced if kind is None else kind(replaced))
        return replacement

    return decorate


def _require_same_parameters(place: str, original: Function, replacement: Function) -> None:
    _, *named = inspect.signature(replacement).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in named):
        return
    ours = [parameter.name for parameter in named]
    theirs = list(inspect.signature(original).parameters)
    if ours != theirs:
        raise NoSeam(f"{place} has the parameters {theirs}, the mutant was written for {ours}")


@contextmanager
def undone() -> Iterator[None]:
    """Put everything that was wrapped inside the block back as it was."""
    before = len(_undo)
    try:
        yield
    finally:
        while len(_undo) > before:
            owner, name, found = _undo.pop()
            setattr(owner, name, found)


def wrapped() -> int:
    """Return how many names are wrapped now."""
    return len(_undo)

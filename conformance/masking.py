# SPDX-License-Identifier: Apache-2.0
"""Tokens struck out of whatever the suite says, also when the Gym under test is the one that says them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MASK = "***"


def mask(text: str, secrets: Iterable[str]) -> str:
    """Replace every secret in a text."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def masked(value: Any, secrets: Iterable[str]) -> Any:
    """Return JSON data with every secret replaced in every string of it, keys included."""
    known = tuple(secrets)
    if isinstance(value, str):
        return mask(value, known)
    if isinstance(value, dict):
        return {mask(str(key), known): masked(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, known) for item in value]
    return value

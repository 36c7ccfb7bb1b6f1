# SPDX-License-Identifier: Apache-2.0
"""Batches that keep within a participant's declared limits, by number and by bytes. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from spec.messages import ParticipantLimits

T = TypeVar("T")

_ENVELOPE_BYTES: Final = 4096
"""Room for everything of a body but its items, in bytes: names, the policy address, time limits."""


def batches(
    items: Iterable[T], limits: ParticipantLimits, form: Callable[[T], Any], most: int | None = None
) -> Iterator[list[T]]:
    """Yield the items in order, as few batches as the limits allow.

    An item that alone exceeds the limit goes in a batch of its own: the participant's refusal then names it.

    Args:
        items: what is to be sent.
        limits: the participant's limits.
        form: item → the JSON value that will stand for it.
        most: an own limit on the number of items.

    Requirements: CKPT-ROLL-059.
    """
    longest = min(limits.max_batch, most or limits.max_batch)
    room = limits.max_body_bytes - _ENVELOPE_BYTES
    batch: list[T] = []
    size = 0
    for item in items:
        weight = len(json.dumps(form(item), ensure_ascii=True)) + 1
        if batch and (len(batch) == longest or size + weight > room):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += weight
    if batch:
        yield batch

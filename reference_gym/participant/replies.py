# SPDX-License-Identifier: Apache-2.0
"""Reading what other servers answer without trusting them."""

from __future__ import annotations

import email.utils
import time

from aiohttp import StreamReader


class BodyTooLong(ValueError):
    """A body is longer than what is accepted."""


async def read_bounded(stream: StreamReader, limit: int) -> bytes:
    """The whole body.

    Args:
        stream: the body of a reply.
        limit: the longest body that is accepted, in bytes.

    Raises:
        BodyTooLong: the body is longer.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in stream.iter_any():
        size += len(piece)
        if size > limit:
            raise BodyTooLong(f"a body of more than {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def parse_retry_after(value: str | None) -> int | None:
    """The milliseconds that a Retry-After header asks to wait; None when it is missing or unreadable."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text) * 1000
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0, round((when.timestamp() - time.time()) * 1000))


def parse_version(value: str | None) -> int | None:
    """The weights version in a header; None when it is missing or no number."""
    text = "" if value is None else value.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text[:17]) < 2**53 and len(text) < 17 else None

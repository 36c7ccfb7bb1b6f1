# SPDX-License-Identifier: Apache-2.0
"""Reading bodies of other servers without trusting their length."""

from __future__ import annotations

from aiohttp import StreamReader


async def read_bounded(stream: StreamReader, limit: int) -> bytes:
    """The whole body.

    Args:
        stream: the body of a reply.
        limit: the longest body that is accepted, in bytes.

    Raises:
        ValueError: the body is longer.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in stream.iter_any():
        size += len(piece)
        if size > limit:
            raise ValueError(f"a body of more than {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)

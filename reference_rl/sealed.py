# SPDX-License-Identifier: Apache-2.0
"""JSON files that notice any damage to themselves.

A sealed file is one JSON object whose last member ``seal`` is the digest of every byte before that member. A flipped
bit, a cut, an appended line or a byte order mark therefore shows in the file itself, without a second file that would
have to be written at the same instant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spec import wire

_MARK = b',\n"seal": "'
_END = b'"}\n'


class SealBroken(ValueError):
    """The bytes are not those that were sealed."""


def seal(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a sealed file; ``content`` has at least one member and none named ``seal``."""
    text = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False)
    head = text.rstrip("}").rstrip().encode()
    if not text.endswith("\n}"):
        raise ValueError("nothing to seal")
    return head + _MARK + wire.bytes_digest(head).encode() + _END


def unseal(data: bytes) -> dict[str, Any]:
    """Return the content of a sealed file.

    Raises:
        SealBroken: the file was altered, cut or extended, or never was sealed.

    Requirements: CKPT-SNAP-041.
    """
    head, mark, tail = data.rpartition(_MARK)
    if not mark or tail != wire.bytes_digest(head).encode() + _END:
        raise SealBroken("its seal does not match its bytes")
    try:
        content = json.loads(data)
    except ValueError as error:
        raise SealBroken(f"it is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise SealBroken("it is not a JSON object")
    del content["seal"]
    return content

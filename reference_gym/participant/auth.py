# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens: held so that they cannot be printed by accident, compared in constant time."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from reference_gym.participant.errors import Unauthorized


@dataclass(frozen=True, slots=True)
class Token:
    """One secret; its text never appears in a representation (CKPT-SEC-006)."""

    text: str = field(repr=False)

    def matches(self, given: str) -> bool:
        """Return whether ``given`` is this token, in constant time (CKPT-SEC-005)."""
        return hmac.compare_digest(
            self.text.encode("utf-8", "surrogateescape"), given.encode("utf-8", "surrogateescape")
        )


def require_token(authorization: str | None, token: Token | None) -> None:
    """Refuse a request that does not carry the token of its plane.

    Args:
        authorization: the header ``Authorization``, or None.
        token: the plane's token; None where none is configured.

    Raises:
        Unauthorized: it is missing or wrong (CKPT-SEC-001).
    """
    if token is None:
        return
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.matches(given.strip()):
        raise Unauthorized("the bearer token of this plane is missing or wrong")

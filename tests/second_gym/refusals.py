# SPDX-License-Identifier: Apache-2.0
"""The error catalogue: what is refused, and the problem document that says so.

Exception
└── Refusal     the answer to a call is this problem document
"""

from __future__ import annotations

from collections.abc import Mapping

Json = Mapping[str, object]

# code: (status, title, retryable, definite)
CATALOGUE: dict[str, tuple[int, str, bool, bool]] = {
    "invalid_request": (400, "The request is malformed", False, True),
    "unauthorized": (401, "The bearer token is missing or wrong", False, True),
    "forbidden_target": (403, "The path is outside the configured roots", False, True),
    "not_found": (404, "There is nothing at this path", False, True),
    "method_not_allowed": (405, "The path does not support this method", False, True),
    "payload_too_large": (413, "The request exceeds a declared limit", False, True),
    "unsupported_media_type": (415, "The body is not of the expected media type", False, True),
    "stale_incarnation": (409, "The participant's state is not the expected one", False, True),
    "stale_controller": (409, "A higher controller has taken over", False, True),
    "stale_checkpoint": (409, "This checkpoint is over", False, True),
    "stale_attempt": (409, "A higher attempt has fenced this one", False, True),
    "checkpoint_conflict": (409, "Another checkpoint is open", True, True),
    "argument_conflict": (409, "The same id was used with other arguments", False, True),
    "target_exists": (409, "The target holds what this commit did not write", False, True),
    "invalid_phase": (409, "The operation is not possible in this phase", False, True),
    "session_lost": (409, "The session is unknown or does not stand where the caller does", False, True),
    "not_ready": (409, "Work is still under way", True, True),
    "checkpoint_corrupt": (422, "The checkpoint is damaged", False, True),
    "state_incompatible": (422, "The checkpoint's state cannot be read here", False, True),
    "state_mismatch": (422, "The lists and the files disagree", False, True),
    "unsupported": (501, "The feature is not offered here", False, True),
    "unsupported_version": (501, "The protocol version is not offered here", False, True),
    "admission_closed": (503, "The gate is closed", True, True),
    "unavailable": (503, "The participant cannot serve this now", True, True),
    "deadline_exceeded": (504, "The time limit of this call ended", True, True),
    "insufficient_storage": (507, "The storage is full", True, True),
    "internal": (500, "The participant failed", True, False),
}
INDEFINITE_AT_DEADLINE = {"commit", "restore", "resume", "abort", "retire"}


class Refusal(Exception):
    """A call is answered with a problem document.

    Args:
        code: a code of the catalogue.
        detail: one sentence for people.
        members: further members, such as `phase` or `blockers`.
        headers: further headers, such as `Allow`.
    """

    def __init__(
        self, code: str, detail: str, members: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.members = dict(members or {})
        self.headers = dict(headers or {})

    def problem(self, operation: str) -> tuple[int, dict[str, object]]:
        """Return status and document of this refusal as the answer to an operation."""
        status, title, retryable, definite = CATALOGUE[self.code]
        if self.code == "deadline_exceeded" and operation in INDEFINITE_AT_DEADLINE:
            definite = False
        document: dict[str, object] = {
            "type": "about:blank",
            "code": self.code,
            "title": title,
            "status": status,
            "detail": self.detail[:4000],
            "retryable": retryable,
            "definite": definite,
        }
        return status, document | self.members


def past_deadline() -> Refusal:
    """Return the refusal of a call whose time has passed while its work goes on."""
    return Refusal("deadline_exceeded", "The work goes on; the same call joins it.", {"continues": True})

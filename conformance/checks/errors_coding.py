# SPDX-License-Identifier: Apache-2.0
"""Content codings of request bodies: what is not decoded is refused, what is decoded is counted."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from conformance.case import Case
from conformance.checks.identity import retiring
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.wire import Reply
from spec import wire as names

UNKNOWN: Final = "x-unknown"
PACK: Final[Mapping[str, Callable[[bytes], bytes]]] = {"gzip": gzip.compress, "deflate": zlib.compress}
MOST_BYTES: Final = 64 * 1024 * 1024


def _post(case: Case, coding: str, content: bytes) -> Reply:
    headers = {**case.controller.headers(case.p), "Content-Type": "application/json", "Content-Encoding": coding}
    return case.wire.raw("POST", f"{case.p.url}{names.PREFIX}/retire", headers=headers, content=content)


def _put(case: Case, name: str, coding: str, content: bytes) -> Reply:
    headers = {**case.controller.headers(case.p), "Content-Encoding": coding}
    headers["Content-Type"] = "application/octet-stream"
    url = f"{case.p.url}{names.PREFIX}/checkpoints/{case.controller.epoch}-76/artifacts/{name}"
    return case.wire.raw("PUT", url, headers=headers, content=content)


@check("CKPT-ERR-042", each="participant", budget="quick")
def unknown_content_codings_are_refused(case: Case) -> None:
    """A body in a content coding that nobody knows is `unsupported_media_type`, whatever it holds; nothing changes."""
    fenced = json.dumps(retiring(case.new_id(), 3)).encode()
    case.controller  # noqa: B018  # it is adopted before anything is compared
    with case.unchanged("CKPT-ERR-042"):
        for content in (fenced, b"{"):
            reply = _post(case, UNKNOWN, content)
            case.refused(reply, "unsupported_media_type", f"{content[:20]!r} in {UNKNOWN}", "CKPT-ERR-042")
        if "artifacts_http" in case.p.capabilities["features"]:
            reply = _put(case, "coded.bin", UNKNOWN, b"x")
            case.refused(reply, "unsupported_media_type", f"an artifact in {UNKNOWN}", "CKPT-ERR-042")


@check("CKPT-ROLL-069", each="participant")
def decoded_bytes_are_counted(case: Case) -> None:
    """Where a coded body is decoded, a small one that unpacks to more than the limit is `payload_too_large`."""
    small = b'{"rollouts":[],"timeout_ms":1}'
    bodies = [coding for coding, pack in PACK.items() if _post(case, coding, pack(small)).ok]
    files: list[str] = []
    if "artifacts_http" in case.p.capabilities["features"]:
        files = [coding for coding, pack in PACK.items() if _put(case, f"{coding}.bin", coding, pack(b"x")).ok]
    if not bodies and not files:
        raise NotOffered(f"it decodes neither {' nor '.join(PACK)}")
    limits = {name: case.p.limit(name) for name in ("max_body_bytes", "max_artifact_bytes")}
    if max(limits.values()) > MOST_BYTES:
        raise NotOffered(f"its limits are {limits}")
    for coding in bodies:
        large = PACK[coding](small[:-1] + b" " * limits["max_body_bytes"] + small[-1:])
        reply = _post(case, coding, large)
        case.refused(reply, "payload_too_large", f"{len(large)} bytes of {coding} as a body", "CKPT-ROLL-069")
    for coding in files:
        large = PACK[coding](bytes(limits["max_artifact_bytes"] + 1))
        reply = _put(case, f"{coding}-large.bin", coding, large)
        case.refused(reply, "payload_too_large", f"{len(large)} bytes of {coding} as an artifact", "CKPT-ROLL-069")

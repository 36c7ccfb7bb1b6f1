# SPDX-License-Identifier: Apache-2.0
"""Limits that a Gym may declare: silence within a body, connections, uploads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import urlencode

from conformance.case import Case
from conformance.controller import Participant
from conformance.cuts import reset
from conformance.errors import Lost, LostReply, NotOffered
from conformance.polls import Polls
from conformance.registry import check
from conformance.wire import Reply
from spec import wire as names

MOST_SILENCE_MS: Final = 10_000
MOST_CONNECTIONS: Final = 500
MOST_ARTIFACTS: Final = 500
MOST_ARTIFACTS_BYTES: Final = 128 * 1024 * 1024
BEYOND: Final = 8
POLL_MS: Final = 1_000


def declared(participant: Participant, name: str, most: int) -> int | None:
    """Return a limit that need not be declared, or None: it is not, or reaching it would take too much."""
    value: int | None = participant.capabilities["limits"].get(name)
    return value if value is not None and value <= most else None


@check("CKPT-TIME-015")
def a_body_has_to_arrive(case: Case) -> None:
    """Half a body, and then nothing for `max_silence_ms`: refused with `unavailable`."""
    silences = {p.name: declared(p, "max_silence_ms", MOST_SILENCE_MS) for p in case.gym.participants}
    calls: list[Callable[[], Reply | None]] = []
    for p in case.gym.participants:
        if silences[p.name] is not None:
            calls.append(partial(_half, case, p, "POST", "/retire", "application/json"))
            if "artifacts_http" in p.capabilities["features"]:
                path = f"/checkpoints/{case.controller.epoch}-75/artifacts/half.bin"
                calls.append(partial(_half, case, p, "PUT", path, "application/octet-stream"))
    if not calls:
        raise NotOffered(f"nobody declares a max_silence_ms of at most {MOST_SILENCE_MS}")
    case.step(f"send one byte of 1000 of {len(calls)} bodies, and nothing more")
    try:
        replies = case.wire.together(calls, within_s=2 * MOST_SILENCE_MS / 1000)
    finally:
        case.wire.reconnect()  # Where one of these was kept open, it still waits for the rest of a body.
    for reply in replies:
        if reply is None:
            case.true(False, "a body that does not arrive is refused", "CKPT-TIME-015", got="no answer")
        else:
            case.refused(reply, "unavailable", f"half a body of {reply.exchange.method}", "CKPT-TIME-015")


def _half(case: Case, p: Participant, method: str, path: str, media: str) -> Reply | None:
    headers = {**case.controller.headers(p), "Content-Type": media, "Content-Length": "1000"}
    url, within_s = p.url + names.PREFIX + path, MOST_SILENCE_MS / 1000 + 5
    try:
        return case.wire.raw(method, url, headers=headers, content=b"{", within_s=within_s)
    except LostReply:
        return None


@check("CKPT-SEC-028", each="rollouts")
def connections_have_a_bound(case: Case) -> None:
    """Of more long polls than `max_connections` that many are served, the others are `unavailable`, or wait."""
    p = case.p
    limit = declared(p, "max_connections", MOST_CONNECTIONS)
    if limit is None:
        raise NotOffered(f"it declares no max_connections of at most {MOST_CONNECTIONS}")
    wait_s = min(case.patience.ms(POLL_MS), p.limit("max_wait_ms")) / 1000
    page = p.get_results()
    while page["more"]:
        page = p.get_results(after=page["next"])
    query = urlencode({"after": page["next"], "wait_ms": round(wait_s * 1000)})
    headers = {"Authorization": f"Bearer {case.wire.tokens['control']}"} if case.wire.tokens.get("control") else {}
    case.step(f"wait for results on {limit + BEYOND} connections for {wait_s:g} s")
    case.wire.reconnect()
    with Polls(p.url, f"{names.PREFIX}/results?{query}", headers) as polls:
        for number in range(limit + BEYOND):
            if number == limit:
                case.patience.pause(wait_s / 6)  # What has come so far is served by now, so that it is not replaced.
            polls.ask()
            polls.read(0)
        asked_s = polls.all[-1].asked_at - polls.all[0].asked_at
        if asked_s > wait_s / 3:
            raise NotOffered(f"to open {limit + BEYOND} connections took {asked_s:.1f} s")
        first = case.until(partial(_first_served, polls), "a long poll is served", "CKPT-SEC-028") or 0.0
        # One that had waited for a place is answered a whole wait after the first: until then none of them counts.
        end = first + wait_s / 2
        while (left := end - time.monotonic()) > 0:
            polls.read(left)
        answered = [poll for poll in polls.all if poll.answered_at is not None and poll.answered_at <= end]
        served = [poll for poll in answered if poll.status == 200]
        if any((poll.answered_at or 0.0) - poll.asked_at < 0.9 * wait_s for poll in served):
            raise NotOffered("the feed has moved meanwhile")
        case.true(len(served) <= limit, f"at most {limit} at the same time", "CKPT-SEC-028", got=len(served))
        # These were served when the others came: nobody takes their place.
        gone = [poll for poll in polls.all[:limit] if poll.answered_at is not None and poll.status is None]
        case.equal(0, len(gone), "connections that were closed while a request was served", "CKPT-SEC-028")
        last = polls.all[-1]  # Nobody came after it whose place it could have made.
        closed = last.answered_at is not None and last.status is None
        case.true(not closed, "the last connection is answered, or waits", "CKPT-SEC-028", got="it was closed")
        refused = {(poll.status, poll.code) for poll in answered if poll.status not in (200, None)}
        case.true(refused <= {(503, "unavailable")}, "what the others are told", "CKPT-SEC-028", got=refused)
    case.until(partial(_room, case, p), "there is room again", "CKPT-SEC-028")


def _first_served(polls: Polls) -> float | None:
    polls.read(0.05)
    return min((poll.answered_at for poll in polls.all if poll.answered_at and poll.status == 200), default=None)


def _room(case: Case, p: Participant) -> bool:
    try:
        return case.wire.raw("GET", f"{p.url}{names.PREFIX}/checkpoint").ok
    except Lost:
        return False


@check("CKPT-ART-015", "CKPT-ERR-031", profile="checkpoint", each="participant", features=("artifacts_http",))
def uploads_have_a_bound(case: Case) -> None:
    """PUT of more artifacts, or of more bytes, than are declared is `insufficient_storage`; a restore makes room."""
    p = case.p
    if "artifacts_http" not in p.capabilities["features"]:
        raise NotOffered("it does not list artifacts_http")
    files = declared(p, "max_artifacts", MOST_ARTIFACTS)
    size = declared(p, "max_artifacts_bytes", MOST_ARTIFACTS_BYTES)
    if files is None and size is None:
        raise NotOffered(f"it declares no bound of at most {MOST_ARTIFACTS} files or {MOST_ARTIFACTS_BYTES} bytes")
    reset(case)
    try:
        if files is not None:
            _refused_in_the_end(case, "files", [1] * (files + 1))
            reset(case)
        if size is not None:
            largest = min(size, p.limit("max_artifact_bytes"))
            _refused_in_the_end(case, "bytes", [*[largest] * (size // largest), size % largest + 1])
    finally:
        reset(case)


def _refused_in_the_end(case: Case, what: str, sizes: list[int]) -> None:
    """Upload files of these sizes, of which the last is beyond the bound; what others have uploaded counts, too."""
    case.step(f"PUT {len(sizes)} artifacts of {sum(sizes)} bytes: beyond the bound of {what}")
    for number, size in enumerate(sizes):
        reply = case.controller.put_artifact(case.p, f"{case.controller.epoch}-74", f"{what}-{number}", bytes(size))
        if not reply.ok:
            what = f"PUT of artifact {number + 1}, of {size} bytes, which is beyond the bound"
            case.refused(reply, "insufficient_storage", what, "CKPT-ART-015", "CKPT-ERR-031")
            return
    case.true(False, f"the last of {len(sizes)} artifacts is refused", "CKPT-ART-015", got="all were taken")

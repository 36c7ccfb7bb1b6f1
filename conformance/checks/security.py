# SPDX-License-Identifier: Apache-2.0
"""Security: tokens of the planes, and what is said about them."""

from __future__ import annotations

from urllib.parse import urlsplit

from conformance.case import Case
from conformance.errors import NotOffered
from conformance.registry import check
from conformance.sockets import is_loopback, listening
from spec import wire as names

PATHS = (
    ("GET", "/capabilities"),
    ("GET", "/checkpoint"),
    *(("POST", f"/checkpoint/{verb}") for verb in ("prepare", "commit", "resume", "abort", "renew", "restore")),
    ("POST", "/retire"),
    ("GET", "/rollouts"),
    ("GET", "/rollouts/r1"),
    ("POST", "/rollouts"),
    ("GET", "/results"),
    ("POST", "/acks"),
    ("GET", "/checkpoints/1-1/artifacts/manifest.json"),
    ("PUT", "/checkpoints/1-1/artifacts/manifest.json"),
)
"""The whole control plane: the token is judged first, whoever serves what (CKPT-ORDER-001)."""
WRONG = ("Bearer wrong", "Basic eA==", "Bearer")


@check("CKPT-SEC-001", each="participant", budget=("quick", "demo"))
def the_control_plane_takes_its_token_alone(case: Case) -> None:
    """Every path without a token, with a wrong one and with another plane's: `unauthorized`, and nothing changes."""
    if not case.wire.tokens.get("control"):
        raise NotOffered("no token is configured")
    with case.unchanged():
        for method, path in PATHS:
            _takes_its_token_alone(case, method, case.p.url + names.PREFIX + path, "data")


@check("CKPT-SEC-001", each="sessions", features=("conformance",), budget="quick")
def the_data_plane_takes_its_token_alone(case: Case) -> None:
    """The probe without a token, with a wrong one and with the control plane's: `unauthorized`, and nothing changes."""
    if not case.wire.tokens.get("data"):
        raise NotOffered("no token is configured")
    with case.unchanged():
        _takes_its_token_alone(case, "POST", case.p.url + names.PROBE_PATH, "control")


def _takes_its_token_alone(case: Case, method: str, url: str, other: str) -> None:
    tokens, path = case.wire.tokens, urlsplit(url).path
    bare = case.wire.raw(method, url, plane="none")
    case.refused(bare, "unauthorized", f"{method} {path} without a token", "CKPT-SEC-001")
    values = {value: f"with {value!r}" for value in WRONG}
    if len({tokens.get("control"), tokens.get("data"), None}) == 3:
        values[f"Bearer {tokens[other]}"] = f"with the token of the {other} plane"
    for value, what in values.items():
        reply = case.wire.raw(method, url, headers={"Authorization": value}, plane="none")
        case.refused(reply, "unauthorized", f"{method} {path} {what}", "CKPT-SEC-001")


@check("CKPT-SEC-006", features=("conformance",), budget="quick")
def no_token_is_ever_said(case: Case) -> None:
    """C75: no recorded response, policy request or world call holds a token of ours."""
    tokens = [token for token in case.wire.tokens.values() if token]
    if not tokens:
        raise NotOffered("no token is configured")
    rollout, entry = case.finished()
    texts = [exchange.response_body.decode("utf-8", "replace") for exchange in list(case.wire.exchanges)]
    texts += [str(call.body) for call in case.witness.generations(rollout.rollout_id)]
    texts.append(entry["result"])
    for token in tokens:
        found = [text[:200] for text in texts if token in text]
        case.equal([], found, "texts that hold a token", "CKPT-SEC-006")


@check("CKPT-SEC-009", level=1)
def no_token_no_start(case: Case) -> None:
    """A Gym whose environment holds no token does not start."""
    with case.process.tokenless() as found:
        got = [endpoint.url for endpoint in found]
        case.equal([], got, "where it listens instead of ending", "CKPT-SEC-009")


@check("CKPT-SEC-010", level=1)
def without_a_token_it_listens_on_loopback(case: Case) -> None:
    """A Gym that is told to serve without a token answers anybody, and listens on loopback addresses alone."""
    words = case.process.file.insecure
    if not words:
        raise NotOffered("target.yaml names no way to serve without a token")
    with case.process.tokenless(*words) as found:
        case.true(found, "it listens", "CKPT-SEC-010", got="it ended")
        reply = case.wire.raw("GET", found[0].url + names.PREFIX + "/capabilities", plane="none")
        case.accepted(reply, "a call without a token")
        addresses = listening(endpoint.pid for endpoint in found if endpoint.pid is not None)
        open_ones = sorted(address for address in addresses if not is_loopback(address))
        case.equal([], open_ones, "addresses that others reach", "CKPT-SEC-010")


@check("CKPT-SEC-008", each="participant")
def planes_have_tokens_of_their_own(case: Case) -> None:
    """The tokens of control plane and data plane differ."""
    tokens = case.wire.tokens
    if not tokens.get("control"):
        raise NotOffered("no token is configured")
    case.true(tokens.get("control") != tokens.get("data"), "the tokens differ", "CKPT-SEC-008", got="one token")


@check("CKPT-ROLL-035", features=("conformance",))
def the_policy_gets_a_credential_from_the_settings(case: Case) -> None:
    """A policy call carries the Gym's own credential: none is in the start call."""
    rollout, _ = case.finished()
    found = [call.headers.get("authorization") for call in case.witness.generations(rollout.rollout_id)]
    if case.bench.target.level == 0 and not any(found):
        raise NotOffered("the suite does not know whether this Gym was given a policy token")
    case.equal(["***"] * len(found), found, "an Authorization header on every policy call", "CKPT-ROLL-035")

# SPDX-License-Identifier: Apache-2.0
"""Discovery and profiles: what a participant says about itself."""

from __future__ import annotations

import json
import re

from conformance.case import Case
from conformance.controller import Json, Participant
from conformance.errors import NotOffered
from conformance.registry import check
from spec import wire as names

RECOMMENDED_STAGES = (("rollouts", 10), ("ledger", 20), ("sessions", 30))
INCARNATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@check(
    "CKPT-DISC-006",
    "CKPT-DISC-001",
    "CKPT-DISC-002",
    "CKPT-DISC-007",
    "CKPT-DISC-008",
    "CKPT-ID-017",
    "CKPT-ID-018",
    "CKPT-ID-019",
    "CKPT-VER-001",
    "CKPT-ERR-003",
    "CKPT-ERR-039",
    each="participant",
    budget=("quick", "demo"),
)
def capabilities_are_valid(case: Case) -> None:
    """Capabilities fit their schema, name the incarnation of the header, something owned and a version 1.x."""
    reply = case.accepted(case.p.get_capabilities(), "capabilities are served", "CKPT-DISC-006", "CKPT-DISC-001")
    case.true(isinstance(reply.json, dict), "the body is JSON", "CKPT-DISC-002", got=reply.brief)
    case.equal(reply["incarnation"], reply.incarnation, "header and body name one incarnation", "CKPT-ID-018")
    case.true(INCARNATION.fullmatch(reply["incarnation"]), "its form", "CKPT-ID-019", got=reply["incarnation"])
    known = {"rollouts", "sessions", "ledger"}
    case.true(known & set(reply["owns"]), "one or more are owned", "CKPT-DISC-007", "CKPT-DISC-008", got=reply["owns"])
    spoken = [version for version in reply["protocol_versions"] if version.startswith("1.")]
    case.true(spoken, "a version 1.x is listed", "CKPT-VER-001", got=reply["protocol_versions"])
    last = case.p.status()
    for field in ("checkpoint_id", "controller", "lease_remaining_ms", "captured", "last"):
        case.true(field in last, f"{field} is there, null or not", "CKPT-ERR-003", got=sorted(last))


@check("CKPT-DISC-007", features=("conformance",))
def who_runs_effects_owns_sessions(case: Case) -> None:
    """The environment `conformance` has state: somebody owns its sessions, and who answers the probe says so."""
    owners = {p.name for p in case.gym.participants if p.owns("sessions")}
    case.true(owners, "a participant owns the sessions of conformance", "CKPT-DISC-007", got="nobody names sessions")
    rollout_id = case.new_id()
    body = {"rollout_id": rollout_id, "attempt": 0, "turn": 1, "request_id": f"{rollout_id}/1/1"}
    content = json.dumps({**body, "tool": "add", "args": {"n": 1}, "effects_done": None}).encode()
    headers = {"Content-Type": "application/json"}
    for p in case.gym.participants:
        reply = case.wire.raw("POST", p.url + names.PROBE_PATH, headers=headers, content=content, plane="data")
        what = f"{p.name} runs effects only if it owns sessions"
        case.true(reply.code != "session_lost" or p.name in owners, what, "CKPT-DISC-007", got=reply.brief)


@check(
    "CKPT-DISC-010",
    "CKPT-DISC-011",
    "CKPT-DISC-012",
    "CKPT-DISC-013",
    "CKPT-DISC-014",
    "CKPT-DISC-015",
    "CKPT-DISC-017",
    "CKPT-STAGE-002",
    each="participant",
    budget=("quick", "demo"),
)
def capabilities_agree_with_themselves(case: Case) -> None:
    """Profiles build on each other, storage and features agree, the state schema reads itself."""
    told = case.p.get_capabilities()
    profiles, owns = set(told["profiles"]), set(told["owns"])
    whole = "checkpoint" not in profiles or "results" in profiles
    case.true(whole, "checkpoint needs results", "CKPT-DISC-010", got=sorted(profiles))
    whole = "turn-recovery" not in profiles or "checkpoint" in profiles
    case.true(whole, "turn-recovery needs checkpoint", "CKPT-DISC-011", got=sorted(profiles))
    for kind, part, key in (
        ("environments", {"rollouts", "sessions"}, "CKPT-DISC-013"),
        ("agents", {"rollouts"}, "CKPT-DISC-014"),
    ):
        continues = [row["name"] for row in told[kind] if row["continuation"] != "restart_only"]
        # Without turn-recovery every one of them may be restart_only (CKPT-DISC-012).
        needed = "turn-recovery" not in profiles or not owns & part or continues
        case.true(needed, f"one of {kind} continues", key, got=told[kind])
    schema = told["state_schema"]
    case.true(schema["version"] in schema["reads"], "the state schema reads itself", "CKPT-DISC-015", got=schema)
    http = ("http" in told["storage"], "artifacts_http" in told["features"])
    case.equal(http[0], http[1], "storage http exactly with feature artifacts_http", "CKPT-DISC-017")
    stage = next(stage for kind, stage in RECOMMENDED_STAGES if kind in owns)
    case.equal(stage, told["stage"], "the recommended stage", "CKPT-STAGE-002")


@check("CKPT-DISC-019", "CKPT-DISC-018", "CKPT-DISC-020", "CKPT-STAGE-001", budget=("quick", "demo"))
def participants_have_names_and_stages(case: Case) -> None:
    """Listed participants report the name they are listed under; names differ; callers come before callees."""
    for participant in case.gym.participants:
        for row in participant.capabilities.get("participants", ()):
            told = case.accepted(case.wire.call("getCapabilities", row["url"]), "a listed one", "CKPT-DISC-018")
            case.equal(row["name"], told["name"], f"the name of {row['url']}", "CKPT-DISC-019")
    found = [participant.name for participant in case.gym.participants]
    case.equal(len(set(found)), len(found), "names differ", "CKPT-DISC-020")
    caller = case.agent
    for called in case.gym.participants:
        if called is not caller:
            stages = {caller.name: caller.stage, called.name: called.stage}
            case.true(caller.stage < called.stage, "the agent's stage is the lowest", "CKPT-STAGE-001", got=stages)


@check(
    "CKPT-STATUS-001",
    "CKPT-STATUS-002",
    "CKPT-STATUS-003",
    "CKPT-STATUS-004",
    "CKPT-STATUS-005",
    "CKPT-STATUS-012",
    "CKPT-STATUS-013",
    "CKPT-STATUS-025",
    "CKPT-STATUS-026",
    "CKPT-STATUS-011",
    "CKPT-INV-001",
    "CKPT-SEC-024",
    each="participant",
    budget=("quick", "demo"),
)
def status_of_an_idle_participant(case: Case) -> None:
    """An idle participant says so: no open id, no lease, the adopted pair, the ended checkpoint, counts that add up."""
    controller = case.controller
    status = case.p.status()
    case.equal("idle", status["phase"], "the phase", "CKPT-STATUS-001")
    case.equal("open", status["gate"], "the gate", "CKPT-STATUS-002")
    case.equal(None, status["checkpoint_id"], "no open id", "CKPT-STATUS-003")
    pair = {"id": controller.controller_id, "epoch": controller.epoch}
    case.equal(pair, status["controller"], "the adopted controller is named", "CKPT-STATUS-004")
    case.equal(None, status["lease_remaining_ms"], "no lease runs", "CKPT-STATUS-005")
    case.equal(None, status["captured"], "nothing is captured", "CKPT-STATUS-011")
    case.equal(False, status["draining"], "it was not told to stop", "CKPT-SEC-024")
    last = status["last"] or {}
    ended = (last.get("checkpoint_id"), last.get("ended_as"))
    case.equal((f"{controller.epoch}-0", "aborted"), ended, "last names the recorded abort", "CKPT-STATUS-026")
    owns = case.p.owns("rollouts")
    case.equal(owns, "feed" in status, "a feed exactly where rollouts are owned", "CKPT-STATUS-012")
    if owns:
        page = case.accepted(case.p.get_results(), "the feed is served")
        case.equal(page["feed"], status["feed"], "status and feed name one feed", "CKPT-STATUS-013")
    else:
        case.equal({0}, set(status["counts"].values()), "zeros where rollouts are not owned", "CKPT-STATUS-025")
    counts_add_up(case, status)


def counts_add_up(case: Case, status: dict[str, dict[str, int]]) -> None:
    """Judge I1 on one status reply."""
    counts = status["counts"]
    parts = ("live", "finished_unreleased", "failed_unreleased", "released", "retired")
    case.equal(counts["admitted"], sum(counts[part] for part in parts), "counts add up", "CKPT-INV-001")
    case.true(counts["restart"] <= counts["live"], "restart is part of live", "CKPT-INV-001", got=counts)


@check("CKPT-ID-035", each="participant")
def reading_needs_no_controller(case: Case) -> None:
    """A GET is answered alike with and without the controller headers, and adopts nobody."""
    higher = {**case.controller.headers(case.p), names.HEADER_CONTROLLER_EPOCH: "999999999"}
    before = case.p.get_status()
    after = case.wire.raw("GET", case.p.url + names.PREFIX + "/checkpoint", headers=higher)
    case.equal(before.status, after.status, "alike with and without", "CKPT-ID-035")
    case.equal(before["controller"], after["controller"], "a GET adopts nobody", "CKPT-ID-035")


@check("CKPT-DISC-004", "CKPT-DISC-003", "CKPT-ROLL-061", each="participant", budget="quick")
def operations_of_what_is_not_owned_are_not_found(case: Case) -> None:
    """Operations on rollouts answer where rollouts are owned, and `not_found` elsewhere; empty batches are fine."""
    replies = {"listRollouts": case.p.get_rollouts(), "getResults": case.p.get_results()}
    replies["ackResults"] = case.controller.ack(case.p, [])
    replies["startRollouts"] = case.controller.start(case.p, [])
    replies["retire"] = case.controller.retire(case.p, {})
    for operation, reply in replies.items():
        if operation == "retire" or case.p.owns("rollouts"):
            case.accepted(reply, f"{operation} is served", "CKPT-DISC-003")
            if "outcomes" in reply.json:
                case.equal([], reply["outcomes"], f"{operation} of an empty batch", "CKPT-ROLL-061")
        else:
            case.refused(reply, "not_found", f"{operation} without rollouts", "CKPT-DISC-004")


@check(
    "CKPT-ERR-023",
    "CKPT-ERR-024",
    "CKPT-ERR-025",
    "CKPT-ERR-007",
    "CKPT-ERR-008",
    "CKPT-ERR-009",
    "CKPT-ERR-018",
    each="participant",
    budget="quick",
)
def framework_errors_are_problem_documents(case: Case) -> None:
    """An unknown path, a wrong method and a wrong media type are refused in the form of this protocol."""
    base = case.p.url + names.PREFIX
    headers = case.controller.headers(case.p)
    text = {**headers, "Content-Type": "text/plain"}
    wrong_type = case.wire.raw("POST", f"{base}/retire", headers=text, content=b"{}")
    for code, key, reply in (
        ("not_found", "CKPT-ERR-023", case.wire.raw("GET", f"{base}/no-such-path")),
        ("method_not_allowed", "CKPT-ERR-024", case.wire.raw("DELETE", f"{base}/checkpoint")),
        ("unsupported_media_type", "CKPT-ERR-025", wrong_type),
    ):
        case.refused(reply, code, f"the framework's own refusal is {code}", key, "CKPT-ERR-008")
        problem_form(case, reply.headers.get("content-type", ""), reply.json)
        said = reply.content.decode("utf-8", "replace")
        traces = [word for word in ("Traceback", 'File "', ".py:", "at java.") if word in said]
        case.equal([], traces, "traces of a stack", "CKPT-ERR-018")


def problem_form(case: Case, content_type: str, problem: object) -> None:
    """Judge the form of a problem document."""
    media = content_type.partition(";")[0].strip().lower()
    case.equal(names.PROBLEM_MEDIA_TYPE, media, "the media type of a problem", "CKPT-ERR-007")
    fields = {"code", "title", "detail", "retryable", "definite"}
    missing = fields - set(problem if isinstance(problem, dict) else ())
    case.equal(set(), missing, "fields that are missing in the problem", "CKPT-ERR-009")


@check("CKPT-VER-002", each="participant", budget="quick")
def another_major_version_is_refused(case: Case) -> None:
    """A path of a major version that nobody speaks is `unsupported_version`."""
    reply = case.wire.raw("GET", case.p.url + "/gym-checkpoint/v99/capabilities")
    case.refused(reply, "unsupported_version", "version 99 is not spoken", "CKPT-VER-002")


@check("CKPT-ERR-026", each="participant")
def what_is_not_listed_is_unsupported(case: Case) -> None:
    """An operation of a profile that is not listed, and a storage scheme that is not, are `unsupported`."""
    if "checkpoint" not in case.p.capabilities["profiles"]:
        reply = case.controller.prepare(case.p, case.controller.next_id())
        case.refused(reply, "unsupported", "prepare without the profile checkpoint", "CKPT-ERR-026")
        return
    missing = {"file", "http"} - set(case.p.capabilities["storage"])
    if not missing:
        raise NotOffered("it lists every profile and storage scheme that this could ask for")
    target = {"scheme": "http"} if missing == {"http"} else {"scheme": "file", "path": "/"}
    reply = case.controller.commit(case.p, case.controller.next_id(), target)
    case.refused(reply, "unsupported", "a commit to a scheme that is not listed", "CKPT-ERR-026")


@check("CKPT-ART-012", profile="checkpoint", each="participant")
def artifacts_without_the_feature_are_unsupported(case: Case) -> None:
    """Without `artifacts_http` the artifact requests are refused with `unsupported`."""
    if "artifacts_http" in case.p.capabilities["features"]:
        raise NotOffered("it lists artifacts_http")
    checkpoint_id = f"{case.controller.epoch}-1"
    got = case.p.get_artifact(checkpoint_id, "manifest.json")
    case.refused(got, "unsupported", "GET of an artifact", "CKPT-ART-012")
    reply = case.controller.put_artifact(case.p, checkpoint_id, "manifest.json", b"{}")
    case.refused(reply, "unsupported", "PUT of an artifact", "CKPT-ART-012")


@check("CKPT-CONF-041", each="participant")
def no_probe_without_the_feature(case: Case) -> None:
    """A participant that does not list `conformance` carries out no probe."""
    if "conformance" in case.p.capabilities["features"]:
        raise NotOffered("it lists the feature conformance")
    reply = case.wire.raw("POST", case.p.url + names.PROBE_PATH, plane="data", content=b"{}")
    case.true(not reply.ok, "the probe is an error", "CKPT-CONF-041", got=reply.brief)


@check("CKPT-ERR-040", "CKPT-ERR-041", "CKPT-ROLL-066", each="rollouts", budget="quick")
def query_parameters_have_their_form(case: Case) -> None:
    """A malformed, unknown or doubled query parameter is `invalid_request`; any cursor is taken."""
    base = case.p.url + names.PREFIX
    for path, queries, key in (
        ("/rollouts", ("limit=0", "limit=x", "state=asleep", "limit=-1"), "CKPT-ERR-040"),
        ("/results", ("limit=0", "limit=1.5", "wait_ms=-1", "wait_ms=x"), "CKPT-ERR-040"),
        ("/rollouts", ("more=1", "limit=1&limit=1"), "CKPT-ERR-041"),
        ("/results", ("more=1", "wait_ms=0&wait_ms=0"), "CKPT-ERR-041"),
    ):
        for query in queries:
            reply = case.wire.raw("GET", f"{base}{path}?{query}")
            case.refused(reply, "invalid_request", f"{path}?{query}", key)
    for cursor in ("", "garbage", "9999999", "%F0%9F%92%A5"):
        reply = case.wire.raw("GET", f"{base}/rollouts?after={cursor}")
        case.accepted(reply, f"the cursor {cursor!r} of the listing", "CKPT-ROLL-066")


@check("CKPT-DISC-009", each="participant", budget="quick")
def listed_profiles_are_served(case: Case) -> None:
    """Every operation of a listed profile is served, and with `turn-recovery` something continues."""
    c, p = case.controller, case.p
    profiles = case.p.capabilities["profiles"]
    replies = {"retire": c.retire(p, {}), "abort": c.abort(p, c.next_id())}
    if p.owns("rollouts"):
        replies |= {"results": p.get_results(), "listing": p.get_rollouts(), "acks": c.ack(p, [])}
        replies |= {"start": c.start(p, [])}
    if "checkpoint" in profiles:
        ended = c.next_id()
        case.accepted(c.abort(p, ended), "an id ends")
        # Of an ended id none of them does anything; what is judged is that they are there.
        replies |= {"prepare": c.prepare(p, ended), "resume": c.resume(p, ended), "renew": c.renew(p, ended)}
        replies |= {"restore": c.restore(p, ended, None), "commit": c.commit(p, ended, _a_target(p))}
    absent = {name: reply.brief for name, reply in replies.items() if reply.status in (404, 405, 501)}
    case.equal({}, absent, "operations of listed profiles that are not served", "CKPT-DISC-009")
    if "turn-recovery" in profiles and (p.owns("rollouts") or p.owns("sessions")):
        rows = [*p.capabilities["environments"], *p.capabilities["agents"]]
        going = [row["name"] for row in rows if row["continuation"] != "restart_only"]
        case.true(going, "an environment or an agent continues: not all are restart_only", "CKPT-DISC-009", got=rows)


def _a_target(p: Participant) -> Json:
    return {"scheme": "file", "path": "/nowhere"} if "file" in p.capabilities["storage"] else {"scheme": "http"}

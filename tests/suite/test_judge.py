# SPDX-License-Identifier: Apache-2.0
"""The judge of single messages: what its sieve lets pass unjudged is what openapi-core has nothing against."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import judge as judging
from conformance.judge import Judge
from spec import load

EXAMPLES = Path(__file__).parents[2] / "spec" / "v1" / "examples"
SPECIFICATION = load()
JSON = "application/json"
PATHS = {"checkpoint_id": "3-4", "name": "index.jsonl", "rollout_id": "p7_g2"}
HEADERS = {
    "Authorization": "Bearer x",
    "Content-Type": JSON,
    "Gym-Controller-Id": "trainer",
    "Gym-Controller-Epoch": "3",
    "Gym-Expect-Incarnation": "i-5c1e9a",
}
ODD = st.sampled_from(
    (
        None,
        True,
        False,
        -1,
        0,
        1.0,
        1.5,
        2**31,
        2**53 + 1,
        2**63,
        2**70,
        1e400,
        "",
        "1",
        "3-4\n",
        "é" * 130,
        "\ud800",
        [],
        {},
        [[]],
    )
)


def examples(schema: Any) -> list[Any]:
    """Return the valid examples of a message whose schema is named by a reference."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return [json.loads(path.read_text()) for path in sorted((EXAMPLES / name / "valid").glob("*.json"))]


def messages() -> Iterator[tuple[str, str, int | None, str, Any]]:
    """Yield method, path, status (None: the request), media type and a body for every message that has examples."""
    for path, item in SPECIFICATION.openapi["paths"].items():
        for method, operation in item.items():
            filled = path.format(**PATHS)
            body = operation.get("requestBody")
            if body is None:
                yield method, filled, None, "", None
            else:
                for media, content in body["content"].items():
                    yield from ((method, filled, None, media, one) for one in examples(content["schema"]))
            for status, given_reply in operation["responses"].items():
                named = given_reply.get("$ref", "").rpartition("/")[2]
                reply = SPECIFICATION.openapi["components"]["responses"][named] if named else given_reply
                for media, content in reply.get("content", {}).items():
                    schema = content["schema"] if media == JSON else {"$ref": "problem"}
                    yield from ((method, filled, int(status), media, one) for one in examples(schema))


MESSAGES = list(messages())


def places(body: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a body."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield (*before, key)
        yield from places(value, (*before, key))


def changed(body: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy of a body with one place changed."""
    made = copy.deepcopy(body)
    held = made
    for key in place[:-1]:
        held = held[key]
    change(held, place[-1])
    return made


@st.composite
def bodies(draw: st.DrawFn, body: Any) -> bytes | None:
    """Draw a body: as it is, or with one value replaced, one field missing, one too many, or no JSON at all."""
    if body is None:
        return draw(st.sampled_from((None, None, b"{}", b"")))
    way = draw(st.sampled_from(("as it is", "replace", "remove", "add", "bytes")))
    found = [place for place in places(body) if place]
    if way == "bytes":
        text = json.dumps(body)
        return draw(
            st.sampled_from((b"", b"{", b"\xff", text[:-1].encode(), b"NaN", text.encode("utf-16"), b"\xef\xbb\xbf{}"))
        )
    if found and way in ("replace", "remove"):
        place, value = draw(st.sampled_from(found)), draw(ODD)
        if way == "replace":
            body = changed(body, place, lambda held, key: held.__setitem__(key, value))
        else:
            body = changed(body, place, lambda held, key: held.pop(key))
    elif way == "add" and isinstance(body, dict):
        body = {**body, draw(st.sampled_from(("unheard_of", "phase", "checkpoint_id"))): draw(ODD)}
    return json.dumps(body).encode()


def odd_headers(usual: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield headers with one of them missing, in another case, or replaced."""
    for name, value in usual.items():
        rest = {key: kept for key, kept in usual.items() if key != name}
        yield rest
        yield {**rest, name.lower(): value}
        odd = ("", "0", "01", "-1", "3.0", " 3", "a b", "é", "x" * 200, "text/html", f"{value}; charset=utf-8")
        yield from ({**rest, name: one} for one in odd)


def odd_urls(path: str) -> Iterator[str]:
    """Yield URLs with another path, or with a query parameter."""
    for changed_path in (f"{path}/", f"{path}/more", path.replace("p7_g2", "-x"), path.replace("p7_g2", "%41")):
        yield f"http://gym:1{changed_path}"
    for name in ("after", "limit", "state", "wait_ms", "other"):
        for value in ("1", "0", "-1", "1.0", "+1", "x", "", "running", "1000001", "%41", "1&limit=2"):
            yield f"http://gym:1{path}?{name}={value}"


@pytest.fixture(scope="module")
def judge() -> Judge:
    """A judge by the specification."""
    return Judge(SPECIFICATION.openapi, SPECIFICATION.errors)


def strict(judge: Judge) -> Judge:
    """Return the same judge without its sieve."""
    made = copy.copy(judge)
    made._passes = lambda kind: False  # type: ignore[method-assign]
    return made


@given(data=st.data(), message=st.sampled_from(MESSAGES))
@settings(max_examples=400, deadline=None)
def test_what_passes_the_sieve_has_no_fault(judge: Judge, data: st.DataObject, message: Any) -> None:
    """Bodies that are valid, and bodies with one thing wrong: openapi-core accepts whatever passes."""
    method, path, status, _, body = message
    assert not passes_wrongly(judge, method, f"http://gym:1{path}", status, usual(message), data.draw(bodies(body)))


def test_no_odd_header_or_url_passes_that_has_a_fault(judge: Judge) -> None:
    """One thing wrong in the head of the first message of each kind: openapi-core accepts whatever passes."""
    firsts = {(message[0], message[1], message[2]): message for message in reversed(MESSAGES)}
    wrong = []
    for message in firsts.values():
        method, path, status, _, body = message
        content, url = None if body is None else json.dumps(body).encode(), f"http://gym:1{path}"
        tries = [(url, one) for one in odd_headers(usual(message))] + [(one, usual(message)) for one in odd_urls(path)]
        wrong += [one for one in tries if passes_wrongly(judge, method, one[0], status, one[1], content)]
    assert [] == wrong


def usual(message: Any) -> Mapping[str, str]:
    """Return the headers that a message of the list has."""
    _, _, status, media, body = message
    if status is None:
        return HEADERS if body is not None else {"Authorization": "Bearer x"}
    return {"Content-Type": media, "Gym-Incarnation": "i-5c1e9a", "Retry-After": "1"}


def passes_wrongly(
    judge: Judge, method: str, url: str, status: int | None, given_headers: Mapping[str, str], content: bytes | None
) -> bool:
    """Say whether the sieve lets a message pass in which openapi-core finds a fault."""
    if status is None:
        kind = judge._sieve.request(method, url, given_headers, content)
        return kind is not None and bool(strict(judge).request_faults(method, url, given_headers, content))
    answer = (status, list(given_headers.items()), content or b"")
    kind = judge._sieve.response(method, url, *answer)
    return kind is not None and bool(strict(judge).response_faults(method, url, *answer))


def test_every_valid_example_passes_the_sieve(judge: Judge) -> None:
    """The quick way is the usual way: no request, and no answer that is no error, has to be judged by openapi-core."""
    left = []
    for method, path, status, media, body in MESSAGES:
        content, url = None if body is None else json.dumps(body).encode(), f"http://gym:1{path}"
        pairs = [("Content-Type", media), ("Gym-Incarnation", "i-5c1e9a")]
        if status is None:
            kind = judge._sieve.request(method, url, HEADERS if content else {}, content)
        elif status == 200 and media == JSON:
            kind = judge._sieve.response(method, url, status, pairs, content or b"")
        else:
            continue
        left += [(method, path, status)] if kind is None else []
    assert [] == left


def test_the_first_message_of_a_kind_is_judged_twice(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that was not seen before goes to openapi-core, and so does a share of the others."""
    monkeypatch.setattr(judging, "SAMPLED", 0.0)
    fresh = Judge(SPECIFICATION.openapi, SPECIFICATION.errors)
    assert [False, True, False, True] == [fresh._passes(kind) for kind in ("a", "a", "b", "a")]
    assert not fresh._passes(None)
    monkeypatch.setattr(judging, "SAMPLED", 1.0)
    assert not fresh._passes("a")

# SPDX-License-Identifier: Apache-2.0
"""The command line against the reference Gym, as an implementer would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from typer.testing import CliRunner

from conformance.cli import app
from conformance.loopback import Listener, Loopback
from conformance.patience import Patience
from conformance.target import ProcessTarget, TargetFile
from conformance.world import World

TARGET = Path(__file__).parent / "targets" / "reference-one.yaml"
LOGGED = TARGET.with_name("reference-log-one.yaml")
OFFERED = ("results", "checkpoint", "turn-recovery")
CHOSEN = ["the_vector", "acid_test_in_the_living_server", "commit_while_preparing", "no_token_is_ever_said"]


@pytest.fixture
def gym(tmp_path: Path) -> Iterator[ProcessTarget]:
    """A reference Gym that runs without the suite; its world URL is a port that is free again."""
    with Loopback() as loopback:
        world = World(loopback, Patience())
        url = world.url
        world.close()
    target = ProcessTarget(TargetFile.read(TARGET), tmp_path, url, Patience(3))
    target.start()
    yield target
    target.close()


def run(target: ProcessTarget, report: Path, *more: str) -> tuple[int, dict[str, object], str]:
    """Run the suite by URL and return the exit code, the report and the output."""
    os.environ["SUITE_CONTROL"], os.environ["SUITE_DATA"] = target.tokens["control"], target.tokens["data"]
    words = ["run", "--url", target.endpoints[0].url, "--token-env", "SUITE_CONTROL", "--data-token-env", "SUITE_DATA"]
    words += ["--json", str(report), "--seed", "3", "--time-scale", "3", *more]
    result = CliRunner().invoke(app, words)
    return result.exit_code, json.loads(report.read_text()) if report.exists() else {}, result.output


def only(*names: str) -> list[str]:
    """Return the options that choose checks."""
    return [word for name in names for word in ("--only", name)]


def test_by_url_with_a_shared_directory_and_a_world(gym: ProcessTarget, tmp_path: Path) -> None:
    """Level 0: the chosen checks pass, the page is written, no token is in either report."""
    page = tmp_path / "report.html"
    world = ["--world-url", gym._world_url, "--shared-dir", str(gym.shared_dir), "--html", str(page)]
    code, report, output = run(gym, tmp_path / "report.json", *world, *only(*CHOSEN))
    assert code == 0, output
    assert {row["name"]: row["status"] for row in report["checks"]} == dict.fromkeys(CHOSEN, "passed")  # type: ignore[attr-defined]
    written = page.read_text() + json.dumps(report) + output
    assert [token for token in gym.tokens.values() if token in written] == []


def test_what_a_gym_says_of_a_token_is_struck_out_of_the_report(gym: ProcessTarget, tmp_path: Path) -> None:
    """C75: a Gym says a token in its replies (here: something that it always says); the failed check does not."""
    page = tmp_path / "report.html"
    url = f"{gym.endpoints[0].url}/gym-checkpoint/v1/capabilities"
    said = httpx.get(url, headers={"Authorization": f"Bearer {gym.tokens['control']}"}).json()["incarnation"]
    gym.tokens["data"] = said
    code, report, output = run(gym, tmp_path / "report.json", "--html", str(page), *only("no_token_is_ever_said"))
    assert code == 1, output
    written = page.read_text() + json.dumps(report) + output
    assert "***" in written, "it was there"
    assert [token for token in gym.tokens.values() if token in written] == []


def test_by_url_alone_what_cannot_be_judged_is_said(gym: ProcessTarget, tmp_path: Path) -> None:
    """Without a world nothing needs one silently; snapshots travel by http; process checks do not apply."""
    chosen = [
        "the_vector",
        "a_restore_moves_to_another_policy",
        "damaged_files_are_refused_by_name",
        "acid_test_through_a_kill",
    ]
    code, report, output = run(gym, tmp_path / "report.json", *only(*chosen, "tombstones_come_from_the_cut"))
    assert code == 0, output
    statuses = {row["name"]: (row["status"], row["reason"]) for row in report["checks"]}  # type: ignore[attr-defined]
    assert statuses["the_vector"] == ("not_applicable", "the Gym was not started with the suite's world URL")
    assert statuses["damaged_files_are_refused_by_name"][0] == "not_applicable"
    assert statuses["acid_test_through_a_kill"] == ("not_applicable", "process control (level 1) is not offered")
    assert statuses["tombstones_come_from_the_cut"][0] == "passed"
    assert "not applicable" in output


@pytest.mark.timeout(300)
def test_the_quick_budget_is_green_with_the_log(tmp_path: Path) -> None:
    """Where the Gym remembers itself after a SIGKILL nothing fails either; on a loaded machine bounds are stretched."""
    report = tmp_path / "report.json"
    suite = Path(sys.executable).with_name("gym-conformance")
    words = ["run", "--target", LOGGED, "--budget", "quick", "--seed", "7", "--time-scale", "2", "--json", report]
    done = subprocess.run([suite, *words], capture_output=True, text=True, check=False, timeout=280)
    assert 0 == done.returncode, done.stdout[-8000:] + done.stderr[-4000:]
    verdict = json.loads(report.read_text())["verdict"]
    assert (0, 0) == (verdict["requirements"]["failed"], verdict["requirements"]["flaky"])
    assert {"conformant", "partial"} >= {verdict["profiles"][profile] for profile in OFFERED}
    assert 400 <= verdict["requirements"]["passed"]


def test_a_wrong_token_is_an_unreachable_target(gym: ProcessTarget, tmp_path: Path) -> None:
    """Discovery that is refused is exit code 5, with the reason."""
    gym.tokens["control"] = "wrong"
    code, _, output = run(gym, tmp_path / "report.json")
    assert code == 5
    assert "unauthorized" in output


def test_usage_and_unreachable_targets_have_exit_codes(tmp_path: Path) -> None:
    """Nothing to judge: 2 for a command line that makes no sense, 5 for nobody at the URL."""
    assert CliRunner().invoke(app, ["run"]).exit_code == 2
    assert CliRunner().invoke(app, ["run", "--url", "http://127.0.0.1:9"]).exit_code == 5
    broken = tmp_path / "target.yaml"
    broken.write_text("start: []\nmore: 1")
    assert CliRunner().invoke(app, ["run", "--target", str(broken)]).exit_code == 2
    silent = tmp_path / "silent.yaml"
    silent.write_text(f"start: [{sys.executable}, -c, 'raise SystemExit(3)']")
    assert CliRunner().invoke(app, ["run", "--target", str(silent)]).exit_code == 5


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:8000/gym-checkpoint/v1", "ftp://127.0.0.1"])
def test_what_is_no_address_of_a_server_is_a_usage_error(url: str) -> None:
    """Exit code 2, before anything is sent."""
    result = CliRunner().invoke(app, ["run", "--url", url])
    assert (2, True) == (result.exit_code, "HOST:PORT" in result.output)


@pytest.mark.parametrize(
    ("headers", "code", "said"), [({}, 5, "not as a participant"), ({"Gym-Incarnation": "i"}, 1, "CKPT-ERR-039")]
)
def test_a_server_that_answers_rubbish(headers: dict[str, str], code: int, said: str) -> None:
    """Some other server is an unreachable target; a participant whose capabilities do not fit is not conformant."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<html>It works!</html>", content_type="text/html", headers=headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    with Loopback() as loopback:
        listener = Listener(loopback, application)
        result = CliRunner().invoke(app, ["run", "--url", listener.url])
        listener.close()
    assert (code, True) == (result.exit_code, said in result.output), result.output

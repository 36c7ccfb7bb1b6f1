# SPDX-License-Identifier: Apache-2.0
"""`gym-conformance`: judge a Gym by its URLs, or one that the suite starts itself.

Exit codes: 0 conformant · 1 a requirement failed · 2 usage · 3 the suite's own fault · 4 flaky · 5 target unreachable.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from conformance import registry, replay, report, session
from conformance.bench import Bench
from conformance.errors import Failed, SuiteError, SuiteFault, TargetUnreachable, UsageError
from conformance.machine_checks import MACHINE_CHECKS
from conformance.masking import mask, masked
from conformance.report import text
from conformance.runner import Settings, choose, narrowed
from conformance.verdict import Outcome, judge
from spec import load

EXIT_FAILED, EXIT_USAGE, EXIT_FAULT, EXIT_UNREACHABLE = 1, 2, 3, 5

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Judges a Gym in any language by its URL.")
console = Console(soft_wrap=True, highlight=False)


class BudgetChoice(Enum):
    """How much is run."""

    QUICK = "quick"
    DEMO = "demo"
    DEFAULT = "default"


UrlOption = Annotated[list[str] | None, typer.Option("--url", help="URL of a participant; may be repeated (level 0).")]
TargetOption = Annotated[Path | None, typer.Option("--target", help="target.yaml: process control (level 1).")]
TokenOption = Annotated[str, typer.Option("--token-env", help="Variable that holds the control-plane token.")]
DataTokenOption = Annotated[str, typer.Option("--data-token-env", help="Variable that holds the data-plane token.")]
SharedOption = Annotated[Path | None, typer.Option("--shared-dir", help="A directory that both sides see.")]
WorldOption = Annotated[str | None, typer.Option("--world-url", help="The world URL that the Gym was started with.")]
BudgetOption = Annotated[BudgetChoice, typer.Option("--budget", help="How much is run.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Order and everything drawn; printed; default random.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the JSON report here.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write the HTML report here.")]
ScaleOption = Annotated[float, typer.Option("--time-scale", help="Factor on every bound of the suite.")]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help="A check, chapter or requirement id.")]
SkipOption = Annotated[list[str] | None, typer.Option("--skip", help="Leave out a check, chapter or requirement id.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No line per check.")]


@app.command()
def run(
    url: UrlOption = None,
    target: TargetOption = None,
    token_env: TokenOption = "GYM_CHECKPOINT_TOKEN",  # noqa: S107 - the name of a variable, not a token
    data_token_env: DataTokenOption = "GYM_CHECKPOINT_DATA_TOKEN",  # noqa: S107 - as above
    shared_dir: SharedOption = None,
    world_url: WorldOption = None,
    budget: BudgetOption = BudgetChoice.DEFAULT,
    seed: SeedOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    time_scale: ScaleOption = 1.0,
    only: OnlyOption = None,
    skip: SkipOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run the checks and the state machine against one Gym."""
    settings = _settings(url, target, token_env, data_token_env, shared_dir, world_url)
    settings = replace(
        settings,
        budget=budget.value,
        seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
        time_scale=time_scale,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
    )
    raise typer.Exit(_guarded(settings, json_file, html_file, quiet=quiet))


@app.command("replay")
def replay_report(
    report_file: Annotated[Path, typer.Argument(help="A JSON report.")],
    url: UrlOption = None,
    target: TargetOption = None,
    token_env: TokenOption = "GYM_CHECKPOINT_TOKEN",  # noqa: S107 - the name of a variable, not a token
    data_token_env: DataTokenOption = "GYM_CHECKPOINT_DATA_TOKEN",  # noqa: S107 - as above
    shared_dir: SharedOption = None,
    world_url: WorldOption = None,
    time_scale: ScaleOption = 1.0,
) -> None:
    """Run again exactly what failed in a report."""
    try:
        settings = _settings(url, target, token_env, data_token_env, shared_dir, world_url)
        settings = replay.failures_of(report_file, replace(settings, time_scale=time_scale))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(_guarded(settings, None, None, quiet=False))


@app.command("list")
def list_checks() -> None:
    """List the checks with the requirements that they exercise."""
    for check in registry.every_check().values():
        console.print(f"{check.chapter:<13} {check.name:<50} {' '.join(check.requirements)}")


def _settings(
    url: list[str] | None,
    target: Path | None,
    token_env: str,
    data_token_env: str,
    shared_dir: Path | None,
    world_url: str | None,
) -> Settings:
    if bool(url) == (target is not None):
        raise typer.BadParameter("give --url (level 0) or --target (level 1)")
    if target is not None:
        return Settings(target_file=target)
    for one in url or ():
        place = urlsplit(one)
        if place.scheme not in ("http", "https") or not place.hostname or place.path.strip("/") or place.query:
            raise typer.BadParameter(f"{one!r} is no address of a server: give http://HOST:PORT, without a path")
    control = os.environ.get(token_env)
    data = os.environ.get(data_token_env, control)
    tokens = {name: value for name, value in (("control", control), ("data", data)) if value}
    port = 0
    if world_url is not None:
        parts = urlsplit(world_url)
        if parts.hostname != "127.0.0.1" or parts.port is None:
            raise typer.BadParameter("--world-url is http://127.0.0.1:PORT: the suite itself listens there")
        port = parts.port
    return Settings(
        urls=tuple(url or ()),
        tokens=tokens,
        shared_dir=shared_dir.resolve() if shared_dir else None,
        world_port=port,
        world_known=world_url is not None,
    )


def _guarded(settings: Settings, json_file: Path | None, html_file: Path | None, *, quiet: bool) -> int:
    # A terminated suite ends the Gym that it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(settings, json_file, html_file, quiet=quiet)
    except TargetUnreachable as error:
        console.print(f"[red]target unreachable:[/] {error}", markup=True)
        return EXIT_UNREACHABLE
    except UsageError as error:
        console.print(f"[red]usage:[/] {error}")
        return EXIT_USAGE
    except Failed as error:
        # Before there is a report: discovery itself.
        console.print(f"[red]not conformant:[/] {', '.join(error.requirements)}: {error.what}")
        console.print(f"  expected: {error.expected}\n  got:      {error.got}", markup=False)
        return EXIT_FAILED
    except (SuiteFault, SuiteError) as error:
        console.print(f"[magenta]the suite itself went wrong:[/] {type(error).__name__}: {error}")
        return EXIT_FAULT


def _run(settings: Settings, json_file: Path | None, html_file: Path | None, *, quiet: bool) -> int:
    specification = load()
    checks = registry.all_checks()
    chosen, parts = choose(checks, settings), narrowed(MACHINE_CHECKS, settings)
    if not chosen and not parts and settings.only:
        raise UsageError(f"no check, chapter or requirement is called {', '.join(settings.only)}")
    started, clock = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()

    def begin(bench: Bench) -> None:
        number = len(chosen) + len(parts)
        console.print(f"seed {settings.seed} · {number} checks · {len(bench.gym.participants)} participants")

    def tell(outcome: Outcome, secrets: Sequence[str]) -> None:
        if not quiet:
            console.print(mask(text.line(outcome), secrets))

    found = session.run(settings, specification, chosen, parts, begin, tell)
    if found.gone is not None:
        console.print(f"[red]the Gym ended during {found.gone}[/]: nothing after it could be judged")
    machine = found.machine
    summary = judge(specification.requirements, found.outcomes, found.gym.profiles)
    made = report.build(
        specification=specification,
        gym=found.gym,
        settings=settings,
        outcomes=found.outcomes,
        summary=summary,
        checks=registry.every_check(),
        started=started,
        seconds=time.monotonic() - clock,
        machine=None if machine is None else {"visits": dict(machine.visits), "unvisited": list(machine.unvisited)},
    )
    data = masked(made.data, found.secrets)
    _write(data, json_file, html_file)
    text.failures(console, data)
    text.verdict(console, data)
    return summary.exit_code


def _write(data: dict[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    for path, content in ((json_file, _pretty), (html_file, report.page)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content(data), encoding="utf-8")


def _pretty(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The command line: `list`, `serve`, `target` and `run`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Broken Gyms for the suite.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the mutants")
    serve = commands.add_parser("serve", help="start the reference Gym with a mutant in it")
    serve.add_argument("name", help="of a mutant, or `clean`")
    serve.add_argument("arguments", nargs="*", help="after `--`: those of `reference-gym serve`")
    target = commands.add_parser("target", help="print a target file for the suite")
    target.add_argument("name", help="of a mutant, or `clean`")
    target.add_argument("--processes", choices=("one", "three"), default="one", help="the process form of the Gym")
    target.add_argument("--log", action="store_true", help="a Gym that keeps a boundary log")
    run = commands.add_parser("run", help="run the suite on the clean Gym and on each mutant")
    run.add_argument("--jobs", type=int, default=2, help="how many at a time")
    run.add_argument("--only", action="append", default=[], metavar="NAME", help="this mutant alone; may be repeated")
    run.add_argument("--budget", choices=("quick", "default"), default="default")
    run.add_argument("--processes", choices=("one", "three"), default="one", help="the process form of the Gym")
    run.add_argument("--without-machine", action="store_true", help="the checks alone")
    run.add_argument("--narrow", action="store_true", help="only the checks of what each breaks: a quick look")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--timeout", type=float, default=420.0, help="seconds for one run of the suite")
    run.add_argument("--resume", action="store_true", help="go on where a run of the same commit was cut short")
    run.add_argument("--output", type=Path, default=Path("build"))
    options = parser.parse_args()
    # Imported late: a Gym process needs nothing of the runner, and the runner nothing of the Gym.
    if options.command == "serve":
        from tests.mutants.serve import serve as start

        start(options.name, options.arguments)
        return 0
    from tests.mutants import runner, telling

    if options.command == "list":
        telling.print_list(runner.console)
        return 0
    if options.command == "target":
        sys.stdout.write(runner.target_of(options.name, options.processes, log=options.log))
        return 0
    return runner.run(
        runner.Plan(
            only=tuple(options.only),
            jobs=options.jobs,
            budget=options.budget,
            processes=options.processes,
            machine=not (options.without_machine or options.narrow),
            narrow=options.narrow,
            seed=options.seed,
            timeout_s=options.timeout,
            resume=options.resume,
            output=options.output,
        )
    )


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, one after the other, each within a time limit of its own; together at most 15 minutes.

Run as ``python -m benchmarks [NAME …]``. A benchmark that does not end in time, or fails, is told at the end, and the
others run all the same.
"""

from __future__ import annotations

import subprocess
import sys

LIMITS_S = {"pause": 120, "log": 150, "stalls": 630}


def main() -> int:
    """Run those that are named, or all; return how many did not end well."""
    names = sys.argv[1:] or list(LIMITS_S)
    if unknown := sorted(set(names) - LIMITS_S.keys()):
        sys.exit(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(LIMITS_S)}")
    failed = []
    for name in names:
        try:
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True, timeout=LIMITS_S[name])
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(f"{name}: {error}")
    for line in failed:
        sys.stderr.write(line + "\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

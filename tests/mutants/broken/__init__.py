# SPDX-License-Identifier: Apache-2.0
"""One broken Gym per module: `BREAKS`, `TARGETS` and `apply`."""

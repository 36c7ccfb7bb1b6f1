# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each prints a table, writes JSON under build/bench and reports ratios within one run."""

# SPDX-License-Identifier: Apache-2.0
"""The reports of a run: JSON for machines, one self-contained HTML page for people, text for the terminal."""

from conformance.report.facts import Report, build
from conformance.report.page import page

__all__ = ["Report", "build", "page"]

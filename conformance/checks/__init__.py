# SPDX-License-Identifier: Apache-2.0
"""The checks, one file per chapter of the specification."""

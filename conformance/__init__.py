# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: judges a Gym in any language by its URL."""

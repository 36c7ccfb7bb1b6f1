# SPDX-License-Identifier: Apache-2.0
"""The resources server: the sessions of the rollouts in their environments, and the effects on them."""

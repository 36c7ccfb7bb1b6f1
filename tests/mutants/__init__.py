# SPDX-License-Identifier: Apache-2.0
"""Broken Gyms: small, realistic bugs in the reference Gym that a conformance suite has to find.

A suite that has never been seen to fail proves nothing. Each module of `broken` changes the reference Gym at one seam
and says in one sentence what that breaks; `BREAKS` names the requirements, written down before the suite met it.

    python -m tests.mutants list
    python -m tests.mutants serve NAME -- --config gym.yaml --announce announce.json
    python -m tests.mutants target NAME > target.yaml; gym-conformance run --target target.yaml
    python -m tests.mutants run [--jobs 2] [--only NAME] [--narrow] [--processes three] [--resume]
"""

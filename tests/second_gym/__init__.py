# SPDX-License-Identifier: Apache-2.0
"""A second Gym, written from the specification alone, with nothing but the standard library.

It shares no line with the reference Gym and reads neither the schemas nor the catalogue: that it passes the suite shows
that the specification is sufficient and that the suite is not fitted to one code base. It offers the profiles `results`
and `checkpoint`; its agent and environments are `restart_only`, so every unfinished rollout starts again after a
restore while every finished one comes back.

Threads and one lock: whoever holds `Gate.lock` sees and changes the whole state at one instant.

    front     HTTP, order of checks          phases     checkpoint ids, leases, controllers
    forms     what a request looks like      saving     prepare, commit, resume, abort, renew
    refusals  the error catalogue            restoring  restore
    gym       the other operations           cuts       a cut on disk
    gate      lock, gate, time that counts   agent      one rollout from start to result
    entries   what a rollout can be          border     where effects are judged; the probe
    book      all of them; fences; feed      calls      HTTP calls of a rollout
    sessions  the conformance environment    policy     the two forms of policy calls
"""

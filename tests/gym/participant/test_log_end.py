# SPDX-License-Identifier: Apache-2.0
"""The rule by which a log is believed, in a world of its own: kills at any step, and copies that come back in parts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from reference_gym.participant.log_end import End, touched
from reference_gym.participant.log_format import MORE, Before

WORLDS = 3_000
BASE, BATCH = "base", "batch"
Copy = tuple[list[tuple[str, Before]], list[End]]


@dataclass
class World:
    """Three files: the frames of the log, and the two ends; ``changed`` are the times of the ends' files.

    The file system's time stands still for a while, so that files share times; two changes of one file do not.
    """

    chosen: random.Random
    now: int = 1
    frames: list[tuple[str, Before]] = field(default_factory=list)
    ends: list[End] = field(default_factory=lambda: [End(0, 1, 0, 0), End(0, 1, 0, 0)])
    changed: list[int] = field(default_factory=lambda: [0, 0])
    last: Before = MORE
    told: int = 0
    copies: list[Copy] = field(default_factory=list)

    def touch(self, file: int) -> None:
        """Change a file of an end, perhaps by its time alone."""
        if self.chosen.random() < 0.3 or self.now <= self.changed[file]:
            self.now += 1
        self.changed[file] = self.now

    def acknowledge(self) -> None:
        """Write the next end."""
        number = self.last.number + 1
        self.touch(number % 2)
        self.ends[number % 2] = End(number, 1, len(self.frames), self.last.changed_ns)
        self.last = Before(number, self.changed[number % 2])
        self.told = self.batches

    @property
    def batches(self) -> int:
        """How many batches the log holds."""
        return sum(kind == BATCH for kind, _ in self.frames)

    def write(self, kind: str, many: int, steps: int) -> int:
        """Write frames at once, of which the last one names the end, and acknowledge them; the steps that are left.

        Args:
            kind: of the frames.
            many: how many.
            steps: after so many of them the process is killed.
        """
        for left in reversed(range(many)):
            if (steps := steps - 1) < 0:
                return steps
            self.frames.append((kind, MORE if left else self.last))
            self.copy()
        if (steps := steps - 1) < 0:
            if self.chosen.random() < 0.5:
                self.touch((self.last.number + 1) % 2)  # The system noted the time, and wrote nothing.
            return steps
        self.acknowledge()
        self.copy()
        return steps

    def copy(self) -> None:
        """Copy everything, as somebody else may do at any instant."""
        self.copies.append((list(self.frames), list(self.ends)))

    def put_back(self) -> None:
        """Put some files of copies back, all of one instant or each of its own, in any order."""
        late = self.copies[-self.chosen.choice((2, 4, 8, 30)) :]
        of = [self.chosen.choice(late)] * 3 if self.chosen.random() < 0.6 else self.chosen.choices(late, k=3)
        for file in self.chosen.sample(range(3), k=self.chosen.randint(1, 3)):
            if file == 2:
                self.frames = list(of[file][0])
            else:
                self.touch(file)
                self.ends[file] = of[file][1][file]

    def believed(self) -> bool:
        """Judge it as the next life does, which goes on from there."""
        read = [end._replace(changed_ns=changed) for end, changed in zip(self.ends, self.changed, strict=True)]
        older, newer = sorted(read)
        if len(self.frames) < newer.offset or touched(newer, older, self.frames[-1][1]) is not None:
            return False
        self.last = Before(newer.number, newer.changed_ns)
        return True


def begun(seed: int) -> World:
    """A world in which a log has begun."""
    world = World(random.Random(seed))
    world.acknowledge()
    world.acknowledge()
    world.frames.append((BASE, world.last))
    world.copy()
    world.acknowledge()
    return world


def live(world: World) -> None:
    """Be one life: a base of its own, then batches, until it is killed."""
    steps = world.write(BASE, 1, world.chosen.randint(0, 12))
    while steps >= 0:
        steps = world.write(BATCH, world.chosen.randint(1, 3), steps)


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_nobody_else_has_touched_is_believed_after_any_kill(seed: int) -> None:
    """CKPT-ID-022: kills in every step, also between the time of a file and its content, life after life."""
    for number in range(WORLDS // 3):
        world = begun(seed * WORLDS + number)
        for _ in range(5):
            live(world)
            assert world.believed(), (seed, number)
            assert world.told <= world.batches


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_is_believed_holds_all_that_was_acknowledged_whatever_was_put_back(seed: int) -> None:
    """CKPT-ID-020, CKPT-ID-021: copies of any instant, whole or in parts, in place: refused, or nothing is lost."""
    refused = 0
    for number in range(WORLDS):
        world = begun((seed + 10) * WORLDS + number)
        for _ in range(5):
            live(world)
            world.put_back()
            if not world.believed():
                refused += 1
                break
            assert world.told <= world.batches, (seed, number)
    assert refused > WORLDS / 2

"""How fast the machine is at present, against what the costs say, told from its last few steps.

Must not know: what a step costs, how costs are fitted, clocks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from statistics import median

from evenflow.core.step_costs import Features

_LAST_STEPS = 4  # the speed is a median over these: three slow steps count, one does not
_NOISE = 0.04  # by so much that median may stray while the machine is as fast as ever
_STRAYING_STEPS = 5  # that all stray by more
_LASTING_CHANGE = 1.2  # than this may show that the machine changed
_RECENT_STEPS = 32  # that may have run since it did
_UNFAMILIAR_SPREAD = 1.5


@dataclass(slots=True)
class Sample:
    """A step that ran."""

    features: Features
    seconds: float
    level: float  # the lasting speed of the machine then

    @property
    def normal_seconds(self) -> float:
        return self.seconds / self.level


@dataclass(slots=True)
class RecentStep:
    sample: Sample
    ratio: float  # seconds / what the costs say
    predicted: float
    level: float  # in the prediction
    spread: float
    is_fresh: bool

    @property
    def is_familiar(self) -> bool:
        """Whether the costs involved are known well: if it strays, that may be the machine."""
        return self.spread < _UNFAMILIAR_SPREAD


class MachineSpeed:
    """A factor on costs. It has a level, which samples are held against, and strays from it with the last few steps."""

    def __init__(self) -> None:
        self.level = 1.0
        self.now = 1.0  # the level, or what the last few steps say against it
        self.recent: deque[RecentStep] = deque(maxlen=_RECENT_STEPS)

    def take(self, step: RecentStep) -> None:
        self.recent.append(step)
        self.update()

    def update(self) -> None:
        ratios = [self.level] * _LAST_STEPS + [step.ratio for step in self._last(_LAST_STEPS)]
        deviation = math.log(median(ratios[-_LAST_STEPS:]) / self.level)
        # What is likely noise is left out, smoothly.
        self.now = self.level * math.exp(deviation**3 / (deviation**2 + _NOISE**2))

    @property
    def last(self) -> float:
        """The speed by the last step alone."""
        return self.recent[-1].ratio if self.recent else self.now

    def settled(self) -> RecentStep | None:
        """The step of which it has just shown whether the machine changed with it."""
        return self.recent[-1 - _STRAYING_STEPS] if len(self.recent) > _STRAYING_STEPS else None

    def suspected_level(self) -> float | None:
        """The level that the last steps speak for, if they all do."""
        ratios = [step.ratio for step in self._last(_STRAYING_STEPS) if step.is_familiar]
        if len(ratios) < _STRAYING_STEPS:
            return None
        strays = min(ratios) > self.level * _LASTING_CHANGE or max(ratios) < self.level / _LASTING_CHANGE
        return median(ratios) if strays else None

    def change_level(self, level: float) -> None:
        """The steps since the change, unlike those before it, ran at the new level."""
        between = math.sqrt(level * self.level)
        for step in self.recent:
            if (step.ratio > between) == (level > between):
                step.sample.level = level
        self.level = level

    def _last(self, number: int) -> list[RecentStep]:
        return list(islice(self.recent, max(0, len(self.recent) - number), None))

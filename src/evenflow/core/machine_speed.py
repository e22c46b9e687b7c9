"""How fast the machine is at present, against what the costs say, told from its last few steps.

Must not know: what a step costs, how costs are fitted, clocks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from evenflow.core.step_costs import Features

_LAST_STEPS = 4  # the speed is a median over these: three slow steps count, one does not
_NOISE = 0.04  # by so much that median may stray while the machine is as fast as ever
_RECENT_STEPS = 5  # that all stray by more
_LASTING_CHANGE = 1.2  # than this may show that the machine changed


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
    is_familiar: bool  # the costs involved are known well: if it strays, that may be the machine


class MachineSpeed:
    """A factor on costs. It has a level, which samples are held against, and strays from it with the last few steps."""

    def __init__(self) -> None:
        self.level = 1.0
        self.now = 1.0  # the level, or what the last few steps say against it
        self.recent: deque[RecentStep] = deque()

    def take(self, step: RecentStep) -> RecentStep | None:
        """Take in a step; returns the one that is recent no more."""
        self.recent.append(step)
        oldest = self.recent.popleft() if len(self.recent) > _RECENT_STEPS else None
        self.update()
        return oldest

    def update(self) -> None:
        ratios = [self.level] * _LAST_STEPS + [step.ratio for step in self.recent]
        deviation = math.log(median(ratios[-_LAST_STEPS:]) / self.level)
        # What is likely noise is left out, smoothly.
        self.now = self.level * math.exp(deviation**3 / (deviation**2 + _NOISE**2))

    def suspected_level(self) -> float | None:
        """The level that the recent steps speak for, if they all do."""
        ratios = [step.ratio for step in self.recent if step.is_familiar]
        if len(ratios) < _RECENT_STEPS:
            return None
        strays = min(ratios) > self.level * _LASTING_CHANGE or max(ratios) < self.level / _LASTING_CHANGE
        return median(ratios) if strays else None

    def set_level(self, level: float) -> None:
        """The recent steps ran at this level, and so will those to come."""
        self.level = level
        for step in self.recent:
            step.sample.level = level

"""The machine's current speed relative to the fitted costs, estimated from its last few steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from evenflow.core.plan import StepShape
from evenflow.core.step_costs import Features

_LAST_STEPS = 4  # the speed is their median: it follows three slow steps, and ignores one
_NOISE = 0.04  # deviations of this size are noise
_STRAYING_STEPS = 5  # the level may have changed if this many steps in a row
_LASTING_CHANGE = 1.2  # deviate by more than this factor
_RECENT_STEPS = 32  # steps that may have run since the change
_UNFAMILIAR_SPREAD = 1.5


@dataclass(slots=True)
class Sample:
    features: Features
    seconds: float
    level: float  # of the machine's speed when it ran

    @property
    def normal_seconds(self) -> float:
        return self.seconds / self.level


@dataclass(slots=True)
class RecentStep:
    sample: Sample
    shape: StepShape
    ratio: float  # seconds / fitted cost
    predicted: float
    level: float  # used for the prediction
    spread: float
    is_fresh: bool

    @property
    def is_familiar(self) -> bool:
        """Are the costs involved known well? If so, a deviation is the machine's."""
        return self.spread < _UNFAMILIAR_SPREAD


class MachineSpeed:
    """A factor on costs: a level that changes rarely, and the deviation of the last few steps from it."""

    def __init__(self) -> None:
        self.level = 1.0
        self.now = 1.0
        self.recent: deque[RecentStep] = deque(maxlen=_RECENT_STEPS)

    def take(self, step: RecentStep) -> None:
        self.recent.append(step)
        self.update()

    def update(self) -> None:
        ratios = [self.level] * _LAST_STEPS + [step.ratio for step in self.recent]
        deviation = math.log(median(ratios[-_LAST_STEPS:]) / self.level)
        # Suppresses deviations within the noise, smoothly.
        self.now = self.level * math.exp(deviation**3 / (deviation**2 + _NOISE**2))

    @property
    def last(self) -> float:
        """The speed of the last step alone."""
        return self.recent[-1].ratio if self.recent else self.now

    def settled(self) -> RecentStep | None:
        """The step after which enough others ran to tell whether the level changed with it."""
        return self.recent[-1 - _STRAYING_STEPS] if len(self.recent) > _STRAYING_STEPS else None

    def suspected_level(self) -> float | None:
        """The level that the last steps suggest, if they all deviate from the current one."""
        ratios = [step.ratio for step in list(self.recent)[-_STRAYING_STEPS:] if step.is_familiar]
        if len(ratios) < _STRAYING_STEPS:
            return None
        strays = min(ratios) > self.level * _LASTING_CHANGE or max(ratios) < self.level / _LASTING_CHANGE
        return median(ratios) if strays else None

    def change_level(self, level: float) -> None:
        """Steps since the change, told by their ratio, ran at the new level."""
        between = math.sqrt(level * self.level)
        for step in self.recent:
            if (step.ratio > between) == (level > between):
                step.sample.level = level
        self.level = level

"""How long a step of a given shape takes on this machine, learned from the steps it ran.

Seconds are a speed, which follows the machine within a few steps, times costs fitted to samples of every kind of step.
Must not know: requests, policies, clocks. The same observations give the same model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from evenflow.core.plan import StepShape
from evenflow.core.step_costs import ATTEMPTS, Features, StepCosts, features_of, fit_costs
from evenflow.errors import InvalidInput

_VERSION = 2

_MAX_SAMPLES = 128
_SAMPLES_PER_KIND = 8
_MIN_SAMPLES = 12  # to be calibrated, with prefill of
_MIN_PREFILL_KINDS = 4
_STEPS_BETWEEN_FITS = 64
_STEPS_BETWEEN_FITS_IF_SURPRISED = 4

_RECENT_STEPS = 9  # the speed is a median over these: five slow steps count, four do not
_NOISE_OF_SPEED = 0.04  # by so much a median of nine may stray while the machine is as fast as ever
_LASTING_CHANGE = 1.2  # a change of speed above this is the machine's own; one below may be a misjudged cost
_LASTING_STEPS = 5  # in a row that make such a change
_SETTLING_STEPS = 32  # that the new level is averaged over
_UNFAMILIAR_SPREAD = 1.5
_SURPRISING_ERROR = 0.15

_NUM_ERRORS = 128  # mixed steps that the margin and the reported error are taken over
_QUANTILE = 0.97
_BURST_QUANTILE = 0.84  # no margin helps against the worst one in six: that is the machine being disturbed, not noise
_UNTRIED_LOG_MARGIN = 0.25
_MAX_MARGIN = 3.0

_Kind = tuple[int, ...]


def _kind(features: Features) -> _Kind:
    """Steps of one kind are alike within a factor of 2 in rows and of 4 in attention."""
    _, _, is_launched, prefill_rows, prefill_attention, decodes, decode_context, _, _ = features
    return (
        prefill_rows.bit_length(),
        prefill_attention.bit_length() // 2,
        decodes.bit_length(),
        decode_context.bit_length() // 2,
        is_launched,
    )


@dataclass(slots=True)
class _Sample:
    features: Features
    seconds: float
    level: float  # the lasting speed of the machine when it ran

    @property
    def normal_seconds(self) -> float:
        return self.seconds / self.level


@dataclass(slots=True)
class _RecentStep:
    sample: _Sample
    ratio: float  # seconds / what the costs say
    predicted: float
    level: float  # in the prediction
    spread: float
    is_mixed: bool


class StepTimeModel:
    """Predicts the seconds of steps from their shapes. Tell it of every step, in the order they ran.

    A sample pushes out one of its own kind, so that thousands of steps that merely decode do not wash out what is known
    of the others. A lasting change of speed moves the level: samples are held against the level of their time, so that
    a change makes none of them stale.
    """

    def __init__(self) -> None:
        self.is_calibrated = False
        self.largest_rows_seen = 0  # padded
        self._kinds: dict[_Kind, deque[_Sample]] = {}  # the one not seen for longest first
        self._num_samples = 0
        self._costs = StepCosts()
        self._num_fits = 0
        self._steps_since_fit = 0
        self._level = 1.0
        self._steps_at_level = _SETTLING_STEPS
        self._speed = 1.0  # the level, or what the last few steps say against it
        self._recent: deque[_RecentStep] = deque()
        self._errors: deque[tuple[float, float]] = deque(maxlen=_NUM_ERRORS)  # see _count_error
        self._log_margin = _UNTRIED_LOG_MARGIN

    # ---- asking ----

    def predict(self, shape: StepShape) -> float:
        """Median seconds: never negative, never less for more of anything, 0 before anything was observed."""
        return self._speed * self._costs.seconds(features_of(shape))

    def margin(self, shape: StepShape) -> float:
        """The factor on `predict` that 97 of 100 mixed steps stay below; wider the less is known of such shapes."""
        log_margin = self._log_margin * self._costs.spread(features_of(shape))
        if shape.padded_rows > self.largest_rows_seen > 0:
            # If the machine turns compute-bound just beyond what was seen, seconds grow as fast as rows.
            log_margin += math.log(shape.padded_rows / self.largest_rows_seen) / 2
        return math.exp(min(log_margin, math.log(_MAX_MARGIN)))

    def upper(self, shape: StepShape) -> float:
        """Seconds that a step of this shape hardly ever exceeds."""
        return self.predict(shape) * self.margin(shape)

    @property
    def error(self) -> float:
        """Mean of |predicted - actual| / actual over recent mixed steps, each predicted before it ran."""
        return sum(abs(math.exp(-error) - 1) for error, _ in self._errors) / max(1, len(self._errors))

    # ---- learning ----

    def observe(self, shape: StepShape, seconds: float) -> None:
        if not 0 < seconds < math.inf:
            return  # relative error needs a duration
        sample = _Sample(features_of(shape), seconds, self._level)
        surprised = not self.is_calibrated or self._follow_speed(shape, sample)
        self.largest_rows_seen = max(self.largest_rows_seen, shape.padded_rows)
        self._keep(sample)
        self._steps_since_fit += 1
        patience = _STEPS_BETWEEN_FITS_IF_SURPRISED if surprised else _STEPS_BETWEEN_FITS
        if self._steps_since_fit >= min(patience, 1 + self._num_samples // 2):
            self._fit()

    def _follow_speed(self, shape: StepShape, sample: _Sample) -> bool:
        """Take in how fast a step was for its shape; True if that is a surprise."""
        predicted = self.predict(shape)
        if not predicted:
            return True  # nothing that such a step holds has a known cost yet
        ratio = self._ratio(sample)
        spread = self._costs.spread(sample.features)
        is_mixed = shape.prefill_rows > 0 and shape.decode_sequences > 0
        self._recent.append(_RecentStep(sample, ratio, predicted, self._level, spread, is_mixed))
        if len(self._recent) > _RECENT_STEPS:
            self._count_error(self._recent.popleft())
        if self._steps_at_level < _SETTLING_STEPS:
            self._steps_at_level += 1
            deviation = max(-_SURPRISING_ERROR, min(math.log(ratio / self._level), _SURPRISING_ERROR))
            self._level *= math.exp(deviation / self._steps_at_level)
        self._update_speed()
        return spread > _UNFAMILIAR_SPREAD or abs(predicted / sample.seconds - 1) > _SURPRISING_ERROR

    def _ratio(self, sample: _Sample) -> float:
        """Seconds / what the costs say; the level itself where new costs say nothing of such a step."""
        expected = self._costs.seconds(sample.features)
        return sample.seconds / expected if expected else self._level

    def _update_speed(self) -> None:
        # Only familiar shapes can show that the machine changed: others may show that the costs are wrong.
        familiar = [step.ratio for step in self._recent if step.spread < _UNFAMILIAR_SPREAD][-_LASTING_STEPS:]
        if len(familiar) == _LASTING_STEPS and (
            min(familiar) > self._level * _LASTING_CHANGE or max(familiar) < self._level / _LASTING_CHANGE
        ):
            self._change_level(median(familiar))
        ratios = [step.ratio for step in self._recent]
        deviation = math.log(median(ratios + [self._level] * (_RECENT_STEPS - len(ratios))) / self._level)
        # What is likely noise is left out, smoothly.
        self._speed = self._level * math.exp(deviation**3 / (deviation**2 + _NOISE_OF_SPEED**2))

    def _change_level(self, level: float) -> None:
        """Samples since the change, unlike those before it, belong to the new level."""
        between = math.sqrt(level * self._level)
        for step in self._recent:
            if (step.ratio > between) == (level > between):
                step.sample.level = level
        self._level = level
        self._steps_at_level = _LASTING_STEPS
        self._steps_since_fit = _STEPS_BETWEEN_FITS

    def _count_error(self, step: _RecentStep) -> None:
        """Note log(actual / predicted) of a mixed step, and what of it no lasting change explains, for the margin."""
        if step.is_mixed:
            error = math.log(step.sample.seconds / step.predicted)
            unexplained = min(error, error - math.log(self._level / step.level), key=abs)
            self._errors.append((error, unexplained / step.spread))
            self._update_margin()

    def _update_margin(self) -> None:
        """Twice the lesser quantile is the greater one where errors are noise; after bursts of slowness it is less."""
        errors = sorted(unexplained for _, unexplained in self._errors)
        last = len(errors) - 1
        largest = min(errors[int(_QUANTILE * last)], 2 * errors[int(_BURST_QUANTILE * last)]) if errors else 0.0
        self._log_margin = max(largest, _UNTRIED_LOG_MARGIN / math.sqrt(1 + len(errors)))

    def _keep(self, sample: _Sample) -> None:
        kind = _kind(sample.features)
        samples = self._kinds.pop(kind, None) or deque()
        self._kinds[kind] = samples
        samples.append(sample)
        self._num_samples += 1
        if len(samples) > _SAMPLES_PER_KIND:
            self._drop_oldest(kind)
        elif self._num_samples > _MAX_SAMPLES:
            self._drop_oldest(max(self._kinds, key=lambda kind: len(self._kinds[kind])))
        if not self.is_calibrated and self._num_samples >= _MIN_SAMPLES:
            self.is_calibrated = sum(1 for prefill_bits, *_ in self._kinds if prefill_bits) >= _MIN_PREFILL_KINDS

    def _drop_oldest(self, kind: _Kind) -> None:
        self._kinds[kind].popleft()
        self._num_samples -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]

    def _fit(self) -> None:
        samples = self._samples()
        features = [sample.features for sample in samples]
        self._costs = fit_costs(features, [sample.normal_seconds for sample in samples], self._costs, self._num_fits)
        self._num_fits += 1
        self._steps_since_fit = 0
        for step in self._recent:
            step.ratio = self._ratio(step.sample)
        self._update_speed()

    def _samples(self) -> list[_Sample]:
        return [sample for samples in self._kinds.values() for sample in samples]

    # ---- saving ----

    def to_record(self) -> dict[str, Any]:
        """All that was learned, as plain data, for a machine as fast as it is now."""
        return {
            "version": _VERSION,
            "largest_rows_seen": self.largest_rows_seen,
            "samples": [[*sample.features[1:], sample.normal_seconds * self._level] for sample in self._samples()],
            "errors": [list(errors) for errors in self._errors],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepTimeModel:
        if record.get("version") != _VERSION:
            raise InvalidInput(f"Got step times of version {record.get('version')!r} but expected {_VERSION}.")
        model = cls()
        model.largest_rows_seen = record["largest_rows_seen"]
        for *figures, seconds in record["samples"]:
            model._keep(_Sample((1, *figures), seconds, level=1.0))
        model._errors.extend((error, unexplained) for error, unexplained in record["errors"])
        model._update_margin()
        for _ in range(ATTEMPTS if record["samples"] else 0):
            model._fit()
        return model

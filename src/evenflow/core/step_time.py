"""How long a step of a given shape takes on this machine, learned from the steps it ran.

Seconds are a speed, which follows the machine within a few steps, times costs fitted to samples of every kind of step.
Must not know: requests, policies, clocks. The same observations give the same model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from evenflow.core.machine_speed import MachineSpeed, RecentStep, Sample
from evenflow.core.plan import StepShape
from evenflow.core.prediction_errors import PredictionError, PredictionErrors
from evenflow.core.step_costs import (
    ATTEMPTS,
    FEW_SAMPLES,
    Features,
    Fit,
    StepCosts,
    candidates,
    features_of,
    has_prefill,
    is_mixed,
    padded_rows,
)
from evenflow.errors import InvalidInput

_VERSION = 4

_MAX_SAMPLES = 128
_SAMPLES_PER_KIND = 8
_MIN_SAMPLES = 12  # to be calibrated, with prefill of
_MIN_PREFILL_KINDS = 4
_STEPS_BETWEEN_FITS = 64
_STEPS_BETWEEN_FITS_IF_SURPRISED = 4

_SURPRISING_ERROR = 0.15

# The first steps of a prefill are called fresh: a device that has rested runs faster until it is hot, and they are
# unlike those that the speed was learned from. They have a margin of their own.
_FRESH_STEPS = 8
_MAX_MARGIN = 3.0

_Kind = tuple[int, ...]


def _kind(features: Features) -> _Kind:
    """Steps of one kind are alike within a factor of 2 in rows and of 4 in attention."""
    _, _, is_launched, _, prefill_rows, prefill_attention, decodes, decode_context, *_ = features
    return (
        prefill_rows.bit_length(),
        prefill_attention.bit_length() // 2,
        decodes.bit_length(),
        decode_context.bit_length() // 2,
        is_launched,
    )


class StepTimeModel:
    """Predicts the seconds of steps from their shapes. Tell it of every step, in the order they ran.

    A sample pushes out one of its own kind, so that thousands of steps that merely decode do not wash out what is known
    of the others. A lasting change of speed moves the level: samples are held against the level of their time, so that
    a change makes none of them stale. Steps with prefill have a speed of their own: what slows a machine's arithmetic
    need not slow its memory, and an error in what decodes cost must not pass for a change of the machine.
    """

    def __init__(self) -> None:
        self.is_calibrated = False
        self.largest_rows_seen = 0  # padded
        self._kinds: dict[_Kind, deque[Sample]] = {}  # the one not seen for longest first
        self._num_samples = 0
        self._costs = StepCosts()
        self._fitting: Iterator[Fit] | None = None  # a fit in the making: a step gives time for one candidate
        self._best_fit: Fit | None = None
        self._suspects: list[MachineSpeed] = []  # that seemed to have changed when the fit began
        self._num_fits = 0
        self._steps_since_fit = 0
        self._speed_of_decodes = MachineSpeed()  # while nothing else is in the step
        self._speed_of_prefill = MachineSpeed()
        self._errors = PredictionErrors()
        self._prefill_steps = 0  # since the last step without prefill

    # ---- asking ----

    def predict(self, shape: StepShape) -> float:
        """Median seconds: never negative, 0 before anything was observed.

        Among steps with prefill, as among those without, more of anything never takes less.
        """
        features = features_of(shape)
        return self._speed_of(features).now * self._costs.seconds(features)

    def margin(self, shape: StepShape) -> float:
        """The factor on `predict` that 98 of 100 mixed steps stay below; wider the less is known of such shapes.

        A step that took longer may be the first of several: the next one allows for as much. So does one of a size that
        took longer each time.
        """
        features = features_of(shape)
        speed = self._speed_of(features)
        log_margin = max(
            self._errors.margin(self._is_fresh) * self._costs.spread(features),
            self._errors.least_of_size(shape.padded_rows),
            math.log(speed.last / speed.now),
        )
        if shape.padded_rows > self.largest_rows_seen > 0:
            # If the machine turns compute-bound just beyond what was seen, seconds grow as fast as rows.
            log_margin += math.log(shape.padded_rows / self.largest_rows_seen)
        return math.exp(min(log_margin, math.log(_MAX_MARGIN)))

    def upper(self, shape: StepShape) -> float:
        """Seconds that a step of this shape hardly ever exceeds."""
        return self.predict(shape) * self.margin(shape)

    @property
    def error(self) -> float:
        """Mean of |predicted - actual| / actual over recent mixed steps, each predicted before it ran."""
        return self._errors.mean

    # ---- learning ----

    def observe(self, shape: StepShape, seconds: float) -> None:
        if not 0 < seconds < math.inf:
            return  # relative error needs a duration
        features = features_of(shape)
        sample = Sample(features, seconds, self._speed_of(features).level)
        surprised = not self.is_calibrated or self._follow_speed(shape, sample)
        self._prefill_steps = self._prefill_steps + 1 if has_prefill(features) else 0
        self.largest_rows_seen = max(self.largest_rows_seen, shape.padded_rows)
        self._keep(sample)
        if surprised or has_prefill(features):
            self._steps_since_fit += 1  # others, which decode as ever, give no reason to fit
        self._go_on_fitting(surprised)

    def _go_on_fitting(self, surprised: bool) -> None:
        patience = _STEPS_BETWEEN_FITS_IF_SURPRISED if surprised else _STEPS_BETWEEN_FITS
        if self._fitting is None and self._steps_since_fit >= min(patience, 1 + self._num_samples // 2):
            self._begin_fit()
        if self._num_samples < FEW_SAMPLES:
            self._finish_fit()
        else:
            self._try_next_candidate()

    @property
    def _speeds(self) -> tuple[MachineSpeed, MachineSpeed]:
        return self._speed_of_decodes, self._speed_of_prefill

    def _speed_of(self, features: Features) -> MachineSpeed:
        return self._speed_of_prefill if has_prefill(features) else self._speed_of_decodes

    def _follow_speed(self, shape: StepShape, sample: Sample) -> bool:
        """Take in how fast a step was for its shape; True if that is a surprise."""
        predicted = self.predict(shape)
        if not predicted:
            return True  # nothing that such a step holds has a known cost yet
        speed = self._speed_of(sample.features)
        spread = self._costs.spread(sample.features)
        step = RecentStep(sample, self._ratio(sample), predicted, speed.level, spread, self._is_fresh)
        speed.take(step)
        settled = speed.settled()
        if settled is not None:
            self._count_error(settled)
        is_off = abs(predicted / sample.seconds - 1) > _SURPRISING_ERROR
        return is_off or not step.is_familiar or speed.suspected_level() is not None

    @property
    def _is_fresh(self) -> bool:
        return self._prefill_steps < _FRESH_STEPS

    def _ratio(self, sample: Sample) -> float:
        """Seconds / what the costs say; the level itself where new costs say nothing of such a step."""
        expected = self._costs.seconds(sample.features)
        return sample.seconds / expected if expected else sample.level

    def _count_error(self, step: RecentStep) -> None:
        """Note log(actual / predicted) of a mixed step, and what of it no lasting change explains, for the margin."""
        if is_mixed(step.sample.features):
            error = math.log(step.sample.seconds / step.predicted)
            unexplained = min(error, error - math.log(self._speed_of_prefill.level / step.level), key=abs)
            self._errors.add(PredictionError(error, unexplained / step.spread, step.is_fresh))
            self._errors.add_to_size(padded_rows(step.sample.features), unexplained)

    def _keep(self, sample: Sample) -> None:
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

    def _begin_fit(self) -> None:
        samples = self._samples()
        features = [sample.features for sample in samples]
        normal_seconds = [sample.normal_seconds for sample in samples]
        self._fitting = candidates(features, normal_seconds, self._costs, self._num_fits)
        self._best_fit = None
        self._suspects = [speed for speed in self._speeds if speed.suspected_level() is not None]
        self._num_fits += 1
        self._steps_since_fit = 0

    def _try_next_candidate(self) -> bool:
        """False if there is none."""
        if self._fitting is None:
            return False
        fit = next(self._fitting, None)
        if fit is None:
            self._fitting = None
            self._adopt_best_fit()
        elif self._best_fit is None or fit.expected_loss < self._best_fit.expected_loss:
            self._best_fit = fit
        return fit is not None

    def _finish_fit(self) -> None:
        while self._try_next_candidate():
            pass

    def _adopt_best_fit(self) -> None:
        assert self._best_fit is not None  # all samples together are a candidate always
        self._costs = self._best_fit.costs
        for speed in self._speeds:
            for step in speed.recent:
                step.ratio = self._ratio(step.sample)
            level = speed.suspected_level()
            if level is not None and speed in self._suspects:
                speed.change_level(level)  # no costs explain how its steps stray
            speed.update()

    def _samples(self) -> list[Sample]:
        return [sample for samples in self._kinds.values() for sample in samples]

    # ---- saving ----

    def to_record(self) -> dict[str, Any]:
        """All that was learned, as plain data, for a machine as fast as it is now."""
        return {
            "version": _VERSION,
            "largest_rows_seen": self.largest_rows_seen,
            "samples": [[*sample.features[1:], self._seconds_now(sample)] for sample in self._samples()],
            "errors": [list(error) for error in self._errors.recent],
        }

    def _seconds_now(self, sample: Sample) -> float:
        return sample.normal_seconds * self._speed_of(sample.features).level

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepTimeModel:
        if record.get("version") != _VERSION:
            raise InvalidInput(f"Got step times of version {record.get('version')!r} but expected {_VERSION}.")
        model = cls()
        model.largest_rows_seen = record["largest_rows_seen"]
        for *figures, seconds in record["samples"]:
            model._keep(Sample((1, *figures), seconds, level=1.0))
        model._errors = PredictionErrors(PredictionError(*error) for error in record["errors"])
        for _ in range(ATTEMPTS if record["samples"] else 0):
            model._begin_fit()
            model._finish_fit()
        return model

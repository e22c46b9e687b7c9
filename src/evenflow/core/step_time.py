"""How long a step of a given shape takes on this machine, learned from the steps that ran.

Seconds are a speed, which follows the machine within a few steps, times costs fitted to samples of every kind of step.
The same observations give the same model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from evenflow.core.machine_speed import MachineSpeed, RecentStep, Sample
from evenflow.core.plan import StepShape
from evenflow.core.prediction_errors import PredictionError, PredictionErrors
from evenflow.core.step_costs import ATTEMPTS, FEW_SAMPLES, Features, Fit, StepCosts, features_of, fits, has_prefill
from evenflow.errors import InvalidInput

_VERSION = 4

_MAX_SAMPLES = 128
_SAMPLES_PER_KIND = 8
_MIN_SAMPLES, _MIN_PREFILL_KINDS = 12, 4  # to be calibrated
_STEPS_BETWEEN_FITS = 64
_STEPS_BETWEEN_FITS_IF_SURPRISED = 4
_SURPRISING_ERROR = 0.15
# The first steps of a prefill are called fresh. An idle device runs faster until it is hot, so they differ from the
# steps that the speed was learned from, and have their own margin.
_FRESH_STEPS = 8
_MAX_MARGIN = 3.0

_Kind = tuple[int, ...]


def _kind(features: Features) -> _Kind:
    """Steps of one kind agree within a factor of 2 in rows and of 4 in attention."""
    _, _, is_launched, _, prefill_rows, prefill_attention, decodes, decode_context, *_ = features
    return (
        prefill_rows.bit_length(),
        prefill_attention.bit_length() // 2,
        decodes.bit_length(),
        decode_context.bit_length() // 2,
        is_launched,
    )


class StepTimeModel:
    """Predicts the seconds of steps from their shapes. `observe` takes every step, in the order they ran.

    A sample replaces one of its own kind, so thousands of decode steps do not displace the others. A lasting change of
    speed moves the level: a sample keeps the level at which it ran, so a change makes none of them stale. Steps with
    prefill have their own speed: what slows arithmetic need not slow memory, and an error in the cost of decodes must
    not look like a change of the machine.
    """

    def __init__(self) -> None:
        self.is_calibrated = False
        self.largest_rows_seen = 0  # padded
        self._kinds: dict[_Kind, deque[Sample]] = {}  # least recently seen first
        self._num_samples = 0
        self._costs = StepCosts()
        self._fitting: Iterator[Fit] | None = None  # of a new fit: one candidate per step
        self._best_fit: Fit | None = None
        self._suspects: list[MachineSpeed] = []  # speeds that seemed to have changed when the fit began
        self._num_fits = 0
        self._steps_since_fit = 0
        self._speeds = MachineSpeed(), MachineSpeed()  # of steps without prefill and with it
        self._errors = PredictionErrors()
        self._prefill_steps = 0  # since the last step without prefill

    # ---- predicting ----

    def predict(self, shape: StepShape) -> float:
        """Median seconds; 0 before anything was observed.

        Monotonic in every figure, separately for steps with prefill and without.
        """
        features = features_of(shape)
        return self._speed_of(features).now * self._costs.seconds(features)

    def margin(self, shape: StepShape) -> float:
        """The factor on `predict` that covers 98 of 100 mixed steps; larger for less familiar shapes.

        A slow step may be the first of several, so the margin covers the last step, and a size that was slow each time.
        """
        features = features_of(shape)
        speed = self._speed_of(features)
        log_margin = max(
            self._errors.margin(self._is_fresh) * self._costs.spread(features),
            self._errors.least_of_size(shape.padded_rows),
            math.log(speed.last / speed.now),
        )
        if shape.padded_rows > self.largest_rows_seen > 0:
            # If the machine becomes compute-bound just beyond the rows seen, seconds grow as fast as rows.
            log_margin += math.log(shape.padded_rows / self.largest_rows_seen)
        return math.exp(min(log_margin, math.log(_MAX_MARGIN)))

    def upper(self, shape: StepShape) -> float:
        """Seconds that a step of this shape rarely exceeds."""
        return self.predict(shape) * self.margin(shape)

    @property
    def error(self) -> float:
        """Mean of |predicted - actual| / actual over recent mixed steps."""
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
            self._steps_since_fit += 1  # decodes alone, as predicted, give no reason to fit
        patience = _STEPS_BETWEEN_FITS_IF_SURPRISED if surprised else _STEPS_BETWEEN_FITS
        if self._fitting is None and self._steps_since_fit >= min(patience, 1 + self._num_samples // 2):
            self._begin_fit()
        if self._num_samples < FEW_SAMPLES:
            self._finish_fit()
        else:
            self._try_next_fit()

    def _speed_of(self, features: Features) -> MachineSpeed:
        return self._speeds[has_prefill(features)]

    def _follow_speed(self, shape: StepShape, sample: Sample) -> bool:
        """Update the speed after a step; True if the step was a surprise."""
        predicted = self.predict(shape)
        if not predicted:
            return True  # none of its figures has a known cost yet
        speed = self._speed_of(sample.features)
        spread = self._costs.spread(sample.features)
        step = RecentStep(sample, shape, self._ratio(sample), predicted, speed.level, spread, self._is_fresh)
        speed.take(step)
        if (settled := speed.settled()) is not None:
            self._count_error(settled)
        is_off = abs(predicted / sample.seconds - 1) > _SURPRISING_ERROR
        return is_off or not step.is_familiar or speed.suspected_level() is not None

    @property
    def _is_fresh(self) -> bool:
        return self._prefill_steps < _FRESH_STEPS

    def _ratio(self, sample: Sample) -> float:
        """Seconds / fitted cost; the level if the costs do not cover such a step."""
        expected = self._costs.seconds(sample.features)
        return sample.seconds / expected if expected else sample.level

    def _count_error(self, step: RecentStep) -> None:
        """Record the error of a mixed step; for the margin, only what no change of level explains."""
        if step.shape.prefill_rows and step.shape.decode_sequences:
            error = math.log(step.sample.seconds / step.predicted)
            level = self._speed_of(step.sample.features).level
            unexplained = min(error, error - math.log(level / step.level), key=abs)
            self._errors.add(PredictionError(error, unexplained / step.spread, step.is_fresh))
            self._errors.add_to_size(step.shape.padded_rows, unexplained)

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
        self._fitting = fits(features, normal_seconds, self._costs, self._num_fits)
        self._best_fit = None
        self._suspects = [speed for speed in self._speeds if speed.suspected_level() is not None]
        self._num_fits += 1
        self._steps_since_fit = 0

    def _try_next_fit(self) -> bool:
        """False if there was none left."""
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
        while self._try_next_fit():
            pass

    def _adopt_best_fit(self) -> None:
        assert self._best_fit is not None  # there is at least one candidate: a single bound
        self._costs = self._best_fit.costs
        for speed in self._speeds:
            for step in speed.recent:
                step.ratio = self._ratio(step.sample)
            level = speed.suspected_level()
            if level is not None and speed in self._suspects:
                speed.change_level(level)  # the new costs do not explain the deviation
            speed.update()

    def _samples(self) -> list[Sample]:
        return [sample for samples in self._kinds.values() for sample in samples]

    # ---- saving ----

    def to_record(self) -> dict[str, Any]:
        """Everything learned, as plain data, at the machine's current speed."""
        return {
            "version": _VERSION,
            "largest_rows_seen": self.largest_rows_seen,
            "samples": [
                [*sample.features[1:], sample.normal_seconds * self._speed_of(sample.features).level]
                for sample in self._samples()
            ],
            "errors": [list(error) for error in self._errors.recent],
        }

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

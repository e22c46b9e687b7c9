"""How long a step of a given shape takes on this machine, learned from the steps that ran.

Seconds are costs fitted to samples of every kind of step, times the machine's speed over its last few steps. The same
observations give the same model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from evenflow.core.plan import StepShape
from evenflow.core.step_costs import KNEES, Sample, StepCosts, figures_of, fit_costs
from evenflow.core.stored_steps import checked_costs, checked_count, checked_errors, checked_samples
from evenflow.errors import InvalidInput

_VERSION = 8

_MAX_SAMPLES = 128  # and errors
_SAMPLES_PER_KIND = 6
_STEPS_BETWEEN_FITS = 8
NUM_REMEMBERED = 16  # of steps without prefill and alike, one after the other: those before leave no trace
_LAST_STEPS = 4  # the speed is their median: it ignores one outlier
_QUANTILE = 0.95  # of errors, that the margin covers
_LONG_STEP = 0.9  # times the median: its errors count for the margin
_UNTRIED_MARGIN = 0.4  # log, before anything is known; shrinks with the square root of the errors known
_MIN_MIXED_STEPS = 12  # to be calibrated
_AFTER_LAUNCH = 1.15  # at most, what a host that only launches takes for a step, over its launch


def _kind(sample: Sample) -> tuple[int, ...]:
    """Samples of one kind agree within a factor of 2 in rows and of 4 in attention."""
    steps, _, rows, attention, logits, context, _, _ = map(sum, zip(*sample.steps, strict=True))
    bits = rows.bit_length(), attention.bit_length() // 2, logits.bit_length(), context.bit_length() // 2
    return steps, *bits


def _alone(shape: StepShape) -> Sample:
    return Sample((figures_of(shape),), 1.0)


class StepTimeModel:
    """Predicts the seconds of steps from their shapes. `observe` takes every step, in the order they ran.

    A sample replaces one of its own kind, so thousands of decode steps do not displace the others. Steps with prefill
    have their own speed: what slows arithmetic need not slow memory.
    """

    def __init__(self, prior: StepCosts | None = None) -> None:
        self.largest_rows_known = 0 if prior is None else 1 << 30  # padded; beyond them the model extrapolates
        self._prior = prior or StepCosts()
        self._costs = self._prior
        self._kinds: dict[tuple[int, ...], deque[Sample]] = {}  # least recently seen first
        self._num_fits = 0
        self._steps_since_fit = 0
        self._last: tuple[deque[Sample], ...] = tuple(deque(maxlen=_LAST_STEPS) for _ in range(2))
        self._speeds = [1.0, 1.0]  # of steps without prefill and with it
        self._launches: tuple[deque[float], ...] = tuple(deque(maxlen=_LAST_STEPS) for _ in range(2))
        self._launch_seconds = [0.0, self._prior.launch]  # of steps with prefill, in a graph and op by op
        # Of mixed steps: predicted seconds of one and log(actual / predicted).
        self._errors: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._margin = _UNTRIED_MARGIN

    @property
    def knee(self) -> int:
        """Up to this many rows are free."""
        return self._costs.knee

    # ---- predicting ----

    def predict(self, shape: StepShape) -> float:
        """Median seconds; 0 before anything is known.

        Monotonic in every figure, separately for steps with prefill and without.
        """
        return max(self._device_seconds(shape), self._launch_seconds[True] if shape.is_launched else 0.0)

    def _device_seconds(self, shape: StepShape) -> float:
        return self._speeds[shape.prefill_rows > 0] * self._costs.seconds(figures_of(shape))

    def margin(self, shape: StepShape) -> float:
        """The factor on `predict` that most mixed steps stay within; larger beyond the rows known."""
        log_margin = self._margin
        if shape.padded_rows > self.largest_rows_known > 0:
            # If the machine becomes compute-bound just beyond the rows known, seconds grow as fast as rows.
            log_margin += math.log(shape.padded_rows / self.largest_rows_known)
        return math.exp(log_margin)

    def upper(self, shape: StepShape) -> float:
        """Seconds that a step of this shape rarely exceeds, and that the host needs to launch it."""
        return max(self.predict(shape) * self.margin(shape), self._launch_seconds[shape.is_launched])

    @property
    def error(self) -> float:
        """Mean of |predicted - actual| / actual over recent mixed steps."""
        return sum(abs(math.exp(-error) - 1) for _, error in self._errors) / max(1, len(self._errors))

    @property
    def is_calibrated(self) -> bool:
        return len(self._errors) >= _MIN_MIXED_STEPS

    # ---- learning ----

    def observe(self, shapes: StepShape | Iterable[StepShape], seconds: float, launches: Sequence[float] = ()) -> None:
        """A step took this long, or these steps did together; `launches`: what the host took to launch each of them."""
        if not 0 < seconds < math.inf:
            return  # relative error needs a duration
        shapes = (shapes,) if isinstance(shapes, StepShape) else tuple(shapes)
        is_mixed = any(shape.prefill_rows and shape.decode_sequences for shape in shapes)
        if is_mixed and (predicted := sum(map(self.predict, shapes))):
            self._errors.append((predicted / len(shapes), math.log(seconds / predicted)))
            self._update_margin()
        self.largest_rows_known = max(self.largest_rows_known, *(shape.padded_rows for shape in shapes))
        if launches and self._is_explained_by(launches, shapes, seconds):
            return
        sample = Sample(tuple(map(figures_of, shapes)), seconds)
        self._keep(sample)
        has_prefill = any(shape.prefill_rows for shape in shapes)
        self._last[has_prefill].append(sample)
        if has_prefill or self._num_fits < _STEPS_BETWEEN_FITS:  # decodes alone leave no time for fits
            self._steps_since_fit += 1
        if self._steps_since_fit >= min(_STEPS_BETWEEN_FITS, 1 + len(self._errors) // 4):  # the first at every step
            self._fit()
        else:
            self._update_speed(has_prefill)

    def learns_between(self, first: StepShape, last: StepShape) -> bool:
        """Of steps without prefill from the first to the last shape, do any but the last few leave a trace?"""
        return self._num_fits < _STEPS_BETWEEN_FITS or _kind(_alone(first)) != _kind(_alone(last))

    def observe_launch(self, shape: StepShape, seconds: float) -> None:
        """The host took this long to launch a step. Meanwhile it hands out no tokens."""
        if shape.prefill_rows:
            launches = self._launches[shape.is_launched]
            launches.append(seconds)
            self._launch_seconds[shape.is_launched] = median(launches)

    def _is_explained_by(self, launches: Sequence[float], shapes: Sequence[StepShape], seconds: float) -> bool:
        """Whether the device may have waited for launches op by op, so that the seconds say little of it."""
        device = [self._device_seconds(shape) for shape in shapes]
        waited = sum(map(max, device, (one * s.is_launched for one, s in zip(launches, shapes, strict=True))))
        return sum(device) < waited and seconds < _AFTER_LAUNCH * waited

    def _update_margin(self) -> None:
        """From all steps but the shorter ones, which do not come near a target."""
        least = _LONG_STEP * median(predicted for predicted, _ in self._errors)
        errors = sorted(error for predicted, error in self._errors if predicted >= least)
        self._margin = max(errors[int(_QUANTILE * len(errors))], _UNTRIED_MARGIN / math.sqrt(1 + len(self._errors)))

    def _keep(self, sample: Sample) -> None:
        kind = _kind(sample)
        self._kinds[kind] = samples = self._kinds.pop(kind, deque(maxlen=_SAMPLES_PER_KIND))
        samples.append(sample)
        if sum(map(len, self._kinds.values())) > _MAX_SAMPLES:
            kind = max(self._kinds, key=lambda kind: len(self._kinds[kind]))  # the first, so the least recently seen
            self._kinds[kind].popleft()
            if not self._kinds[kind]:
                del self._kinds[kind]

    def _fit(self) -> None:
        """Compare the knee in use with others: with all of them while nothing is known, then with one at a time."""
        knee = self._costs.knee
        others = (*KNEES, knee * 4 // 5, knee * 5 // 4 + 1)
        if self.is_calibrated or any(self._prior):
            others = others[self._num_fits % len(others) :][:1]
        samples = list(chain.from_iterable(self._kinds.values()))
        self._costs = fit_costs(samples, self._costs, self._prior, (knee, *others))
        self._num_fits += 1
        self._steps_since_fit = 0
        for has_prefill in (False, True):
            self._update_speed(has_prefill)

    def _update_speed(self, has_prefill: bool) -> None:
        ratios = [one.seconds / cost for one in self._last[has_prefill] if (cost := one.cost(self._costs))]
        self._speeds[has_prefill] = median(ratios or [1.0])

    # ---- saving ----

    def to_record(self) -> dict[str, Any]:
        """Everything learned, as plain data."""
        return {
            "version": _VERSION,
            "largest_rows_known": self.largest_rows_known,
            "costs": [*self._costs],
            "samples": [[*sample] for sample in chain.from_iterable(self._kinds.values())],
            "errors": [[*error] for error in self._errors],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], prior: StepCosts | None = None) -> StepTimeModel:
        """InvalidInput if this is not a record of `to_record`: with other numbers, no step might ever be planned."""
        if not isinstance(record, Mapping) or record.get("version") != _VERSION:
            version = record.get("version") if isinstance(record, Mapping) else record
            raise InvalidInput(f"Got step times of version {version!r:.40} but expected {_VERSION}.")
        model = cls(prior)
        for sample in checked_samples(record.get("samples"), _MAX_SAMPLES):
            model._keep(sample)
        if model._kinds:
            model._costs = checked_costs(record.get("costs"))
        model.largest_rows_known = checked_count(record.get("largest_rows_known"))
        model._errors.extend(checked_errors(record.get("errors"), _MAX_SAMPLES))
        if model._errors:
            model._update_margin()
        return model

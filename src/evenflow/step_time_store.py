"""Learned step times, stored for the next start of the same model on the same machine."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidInput
from evenflow.host import cache_folder

logger = logging.getLogger("evenflow")

SAVE_INTERVAL_S = 300.0
_MAX_BYTES = 16 << 20
_NUM_STARTS = 8  # that decide the default target: after these, a slower machine counts as slower


def step_times_path(*key: object) -> Path:
    """The file of step times for this key: everything that they depend on."""
    return cache_folder() / "step-times" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json"


def load_step_times(path: Path, prior: StepCosts | None = None) -> StepTimeModel | None:
    """Step times learned by an earlier start; None if none are usable."""
    try:
        return StepTimeModel.from_record(_read(path), prior)
    except (OSError, ValueError, RecursionError):  # InvalidInput is a ValueError
        return None


def save_step_times(model: StepTimeModel, path: Path) -> bool:
    """Save for the next start. An unwritable cache costs that start only some accuracy."""
    try:
        _write(path, model.to_record())
    except OSError as error:
        logger.warning(
            "Step times were not kept for the next start, which measures them again: %s cannot be written (%s); "
            "set EVENFLOW_CACHE to a folder that can be.",
            *(path.parent, error.strerror),
        )
        return False
    return True


def _read(path: Path) -> Any:
    if path.stat().st_size > _MAX_BYTES:
        raise InvalidInput(f"{path} is larger than anything that was stored there")
    return json.loads(path.read_text())


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{secrets.token_hex(8)}.tmp")  # several engines of one model may save at once
    try:
        scratch.write_text(json.dumps(content))
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def min_target(path: Path, target_s: float) -> float:
    """The lowest target of this start and the last ones, which are kept beside the step times.

    A machine that is or was busy at one start can still reach its earlier targets.
    """
    kept = path.with_suffix(".targets")
    try:
        earlier = [seconds for seconds in map(float, _read(kept)) if 0 < seconds < math.inf]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        earlier = []
    targets = [*earlier, target_s][-_NUM_STARTS:]
    with suppress(OSError):  # saving the step times will report it
        _write(kept, targets)
    return min(targets)


class StepTimeKeeper:
    """Saves a learning model every few minutes and at the end: the first start's measurements may be far off, if the
    machine was busy."""

    def __init__(self, model: StepTimeModel, path: Path) -> None:
        self._model = model
        self._path = path
        self._saved_at: float | None = None
        self._has_news = False
        self._can_save = True

    def after_step(self, now: float) -> None:
        self._has_news = True
        if self._saved_at is None:
            self._saved_at = now
        elif now - self._saved_at >= SAVE_INTERVAL_S:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        """Save news, if any. A failed save is not retried: one warning is enough."""
        if self._has_news and self._can_save:
            self._can_save = save_step_times(self._model, self._path)
        self._has_news = False

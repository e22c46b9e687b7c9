"""The entry point of evenflow's plug-in for SGLang: does nothing without a target, refuses unsupported versions."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version

from evenflow.errors import EvenflowError, MissingDependency
from evenflow.hosts.settings import TARGET_VARIABLE, read_settings

TESTED_VERSIONS = ("0.5.16",)

logger = logging.getLogger("sglang.evenflow")


def load() -> None:
    """SGLang calls this in each of its processes."""
    if TARGET_VARIABLE not in os.environ:
        logger.info("evenflow: no latency target is kept: set %s, such as %s=50ms", TARGET_VARIABLE, TARGET_VARIABLE)
        return
    try:
        read_settings(None)
        _register()
    except EvenflowError as error:
        # Any other exception SGLang would log, and then serve without the target.
        raise SystemExit(f"evenflow: {error}") from None


def _register() -> None:
    try:
        from evenflow.sglang import hooks
    except ImportError as error:  # of a name that this version has not
        raise unsupported(str(error)) from error
    hooks.register()


def unsupported(missing: str) -> MissingDependency:
    """The refusal of a version that lacks what evenflow relies on."""
    return MissingDependency(
        f"SGLang {version('sglang')} lacks what evenflow's plug-in relies on: {missing}. It is tested on "
        f"{', '.join(TESTED_VERSIONS)}: use one of these, or unset {TARGET_VARIABLE} to serve without a target."
    )


def check_has(holder: object, names: Sequence[str]) -> None:
    """Refuse a version in which this object lacks one of these attributes."""
    for name in names:
        if not hasattr(holder, name):
            raise unsupported(f"{type(holder).__name__}.{name}")

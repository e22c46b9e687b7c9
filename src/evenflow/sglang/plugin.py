"""The entry point of evenflow's plug-in for SGLang: does nothing without a target, refuses unsupported versions."""

from __future__ import annotations

import logging
import os

from evenflow.errors import EvenflowError
from evenflow.hosts.settings import TARGET_VARIABLE, read_settings
from evenflow.sglang.launch import SGLANG

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
        raise SGLANG.unsupported(str(error)) from error
    hooks.register()

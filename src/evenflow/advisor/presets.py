"""Kinds of work whose inputs are known well enough to advise without data."""

from __future__ import annotations

from evenflow.advisor.analysis import DatasetAnalysis, DatasetTally
from evenflow.advisor.tokens import EstimatedTokens
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import TraceRequest

PRESET_TOKENS = {"code": 4000, "document": 12000, "retrieval": 24000, "evaluation": 47}


def preset_dataset(name: str) -> DatasetAnalysis:
    """A dataset that holds the typical input of this kind of work."""
    if name not in PRESET_TOKENS:
        raise InvalidInput(f"Got the preset {name!r} but expected one of {', '.join(PRESET_TOKENS)}.")
    tally = DatasetTally(f"preset {name}", EstimatedTokens())
    tally.add(TraceRequest(PRESET_TOKENS[name]))
    return tally.analysis({})

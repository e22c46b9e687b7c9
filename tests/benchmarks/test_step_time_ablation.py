"""The ablation of the step-time model, on the beginning of one recorded load."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import step_time_ablation as ablation
from recorded_device import RECORDINGS, caps_of, prior_of
from step_recording import read_recording

from evenflow.core.step_time import StepTimeModel

RECORDING = "h200_vllm026_graphs2048.jsonl.gz"


def mean_error(variant: str) -> float:
    recording = read_recording(RECORDINGS / RECORDING)
    load = replace(recording.loads[0], steps=recording.loads[0].steps[:400])
    with ablation.VARIANTS[variant]():
        found = list(ablation.predictions(load, caps_of(recording), StepTimeModel(prior_of(recording))))
    return fmean(abs(prediction.predicted / prediction.actual - 1) for prediction in found)


def test_the_whole_model_predicts_recorded_steps_and_leaving_out_its_rows_does_not() -> None:
    whole = mean_error("all parts")
    assert whole < 0.2
    assert mean_error("no cost of prefill") != whole
    assert mean_error("all parts") == whole  # nothing stays left out

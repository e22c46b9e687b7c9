"""The classes that `record_vllm_steps.py` has vLLM use: they live in vLLM's engine process and keep one step log."""

from __future__ import annotations

import json
from typing import Any

import torch
import vllm
from step_log import StepLog, recording
from step_recording import encode_steps
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.gpu_worker import Worker

LOG = StepLog()

RecordingScheduler = recording(AsyncScheduler, LOG)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class RecordingWorker(Worker):  # type: ignore[misc]
    """vLLM's worker, with an event before each step, between its forward pass and its sampling, and after it.

    The events are read when the load has ended. The engine calls the other methods by `collective_rpc`.
    """

    _launching: Any = None

    def execute_model(self, scheduler_output: Any) -> Any:
        logged = self._launching = LOG.launching(scheduler_output)
        if logged is None:
            return super().execute_model(scheduler_output)
        logged.events.append(_event())
        output = super().execute_model(scheduler_output)
        logged.events.append(_event())
        logged.step.launched_us = LOG.now_us()
        batch = getattr(getattr(self.model_runner, "execute_model_state", None), "input_batch", None)
        logged.step.padded_rows = int(getattr(batch, "num_tokens_after_padding", 0))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        logged, self._launching = self._launching, None
        if logged is not None:
            logged.events.append(_event())
            logged.step.sampled_us = LOG.now_us()
        return output

    def describe_recording(self) -> str:
        return json.dumps(
            {
                "capture_sizes": LOG.capture_sizes,
                "largest_budget": LOG.largest_budget,
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(),
                "model_runner": f"{type(self.model_runner).__module__}.{type(self.model_runner).__name__}",
            }
        )

    def begin_load(self, seed: int) -> None:
        """Start a new log. The host's clock starts beside the reference event, on an idle GPU."""
        torch.cuda.synchronize()
        LOG.begin_load(seed)
        # One reference a load: CUDA gives differences as 32-bit floats, which over minutes are too coarse.
        self._reference = _event()
        self._reference.synchronize()
        self._reference_seen_us = LOG.now_us()

    def end_load(self) -> str | None:
        """The load's steps as JSON; None while some are still in flight."""
        if not LOG.is_idle:
            return None
        torch.cuda.synchronize()
        before_us = LOG.now_us()
        last = _event()
        last.synchronize()
        after_us = LOG.now_us()
        for logged in LOG.steps:
            logged.set_gpu_times([self._gpu_us(event) for event in logged.events])
        return json.dumps(
            {
                "reference_us": [0, self._reference_seen_us],
                "end_reference": {"gpu_us": self._gpu_us(last), "host_us": [before_us, after_us]},
                "num_preempted": LOG.num_preempted,
                "columns": encode_steps([logged.step for logged in LOG.steps]),
            },
            separators=(",", ":"),
        )

    def _gpu_us(self, event: torch.cuda.Event) -> int:
        return round(1000 * float(self._reference.elapsed_time(event)))

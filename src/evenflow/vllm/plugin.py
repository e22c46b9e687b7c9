"""A scheduler class for vLLM that keeps evenflow's latency target.

vLLM's own scheduler still does all the work; `steering` limits what a step may hold. vLLM declares its scheduler
interface unstable, so everything that evenflow relies on is checked at start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from evenflow.hosts.settings import read_settings
from evenflow.vllm.launch import VLLM
from evenflow.vllm.steering import VllmSteering
from evenflow.vllm.uses import REQUEST, SCHEDULER

T = TypeVar("T")


class LatencyTargetScheduler:
    """Builds the scheduler that vLLM itself would choose for its settings, asynchronous or not, steered by evenflow."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler_config = copy.copy(vllm_config.scheduler_config)
        scheduler_config.scheduler_cls = None
        return steered(scheduler_config.get_scheduler_cls())(vllm_config, *args, **kwargs)


def steered(base: type[Any]) -> type[Any]:
    """A subclass of one of vLLM's schedulers that keeps the target."""
    VLLM.check_methods(SCHEDULER, base)

    class Steered(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            VLLM.check_attributes(SCHEDULER, self)
            VLLM.check_attributes(REQUEST, Request("example", [0], SamplingParams(max_tokens=1), None))
            self.steering = VllmSteering(self, read_settings(self.vllm_config.additional_config))

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            self._follow(partial(self.steering.add, request))

        def schedule(self, throttle_prefills: bool = False) -> Any:
            with self.steering.next_step() as is_steered:
                output = super().schedule(throttle_prefills and not is_steered)
            self._follow(partial(self.steering.scheduled, output))
            return output

        def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
            # vLLM calls this between the forward pass and the sampling.
            self._follow(partial(self.steering.core.launched, scheduler_output))
            return super().get_grammar_bitmask(scheduler_output)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            step = self._follow(partial(self.steering.core.ended, scheduler_output))
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if step is not None:
                self._follow(partial(self.steering.emitted, step, outputs))
            return outputs

        def shutdown(self) -> None:
            self._follow(self.steering.core.close)
            super().shutdown()

        def _follow(self, work: Callable[[], T]) -> T | None:
            """Whatever goes wrong in evenflow must not end vLLM."""
            return self.steering.core.best_effort.run("following vLLM's steps", work, None)

    Steered.__name__ = Steered.__qualname__ = f"LatencyTarget{base.__name__}"
    return Steered

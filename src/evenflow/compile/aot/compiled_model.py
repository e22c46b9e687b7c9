"""A transformers model whose steps run compiled where they can, and plain where they cannot: same call, same answer.

Must not know: how packages are made and kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from evenflow.compile.aot.step_runner import StepRunner
from evenflow.compile.model_call import STEP_ARGUMENTS, Model, named_arguments
from evenflow.compile.model_interface import ModelInterface
from evenflow.compile.monitoring import PerformanceMonitor

logger = logging.getLogger("evenflow")

PositionRule = Callable[[Tensor, int], Tensor]  # (mask, tokens of the call) -> positions of the call's tokens


def positions_by_order(mask: Tensor, num_tokens: int) -> Tensor:
    """Padding counts: what most models do when they are given no positions."""
    num_known = mask.shape[1]
    return torch.arange(num_known - num_tokens, num_known, device=mask.device).repeat(mask.shape[0], 1)


def positions_by_mask(mask: Tensor, num_tokens: int) -> Tensor:
    """Padding does not count."""
    return ((mask.cumsum(-1) - 1) * mask)[:, -num_tokens:]


class CompiledModel(ModelInterface):
    """Called as the model is. What the compiled step cannot honour runs in the plain model, the reason logged once."""

    def __init__(
        self,
        model: Model,
        runner: StepRunner,
        output_class: Any,
        position_rule: PositionRule,
        monitor: PerformanceMonitor | None = None,
    ) -> None:
        super().__init__(model)
        self.monitor = monitor
        self._runner = runner
        self._position_rule = position_rule
        self._weight = next(self.wrapped_module.parameters())
        self._device, self._address = self._weight.device, self._weight.data_ptr()
        self._output_class = output_class
        self._reasons_told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = named_arguments(self.wrapped_module, args, kwargs)
        started = time.perf_counter()
        reason = self._why_not_compiled(call)
        output = self._run_compiled(call) if reason is None else self.inner_model(**call)
        if reason is not None:
            self._tell_once(reason)
        if self.monitor is not None:
            tokens = call.get("input_ids", call.get("inputs_embeds"))
            num_tokens = 0 if tokens is None else tokens.shape[0] * tokens.shape[1]
            self.monitor.record("compiled" if reason is None else "plain", num_tokens, time.perf_counter() - started)
        return output

    forward = __call__

    def _why_not_compiled(self, call: Mapping[str, Any]) -> str | None:
        tokens, mask, cache = (call.get(name) for name in ("input_ids", "attention_mask", "past_key_values"))
        if tokens is None or tokens.ndim != 2 or tokens.device != self._device:
            return "it is not called with input_ids of shape (batch, tokens) on the model's device"
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            return "the attention mask is not of shape (batch, tokens)"
        if cache is not None and not self._runner.can_run(cache):
            return f"{type(cache).__name__} is not the kind of cache that the model makes itself"
        for name, value in call.items():
            if name not in STEP_ARGUMENTS and value is not False:
                return f"{name} is asked for"
        if self._weight.data_ptr() != self._address:
            return "the weights were moved after compilation"
        module = self.wrapped_module
        if module.training or (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return "it trains, or gradients are recorded: call it within torch.inference_mode()"
        if any(getattr(module.config, name, False) for name in ("output_attentions", "output_hidden_states")):
            return "the model's configuration asks for attentions or hidden states"
        return None

    def _run_compiled(self, call: Mapping[str, Any]) -> Any:
        tokens: Tensor = call["input_ids"]
        num_sequences, num_new = tokens.shape
        cache = call.get("past_key_values")
        if cache is None:
            cache = self._runner.new_cache()
        num_known = int(cache.get_seq_length()) + num_new
        mask = call.get("attention_mask")
        if mask is None:
            mask = torch.ones(num_sequences, num_known, dtype=torch.bool, device=self._device)
        else:
            mask = mask.to(torch.bool)
        positions = call.get("position_ids")
        if positions is None:
            positions = self._position_rule(mask, num_new)
        rows = _logit_rows(call.get("logits_to_keep"), num_new, self._device)
        logits, cache = self._runner.run(tokens, mask, positions.expand(num_sequences, -1), rows, cache)
        config = self.wrapped_module.config
        keep_cache = call.get("use_cache", getattr(config, "use_cache", True))
        output = self._output_class(logits=logits, past_key_values=cache if keep_cache else None)
        return output if call.get("return_dict", config.return_dict) else output.to_tuple()

    def _tell_once(self, reason: str) -> None:
        if reason not in self._reasons_told:
            self._reasons_told.add(reason)
            logger.warning("A call runs in the plain model, not in the compiled one: %s.", reason)


def _logit_rows(logits_to_keep: int | Tensor | None, num_tokens: int, device: torch.device) -> Tensor:
    rows = torch.arange(num_tokens, device=device)
    if isinstance(logits_to_keep, Tensor):
        return rows[logits_to_keep.to(device)]
    return rows[-logits_to_keep:] if logits_to_keep else rows

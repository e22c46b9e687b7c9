"""Measures a GPU's memory left for keys and values, by running the largest steps once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from evenflow.core.request import SamplingParams
from evenflow.model.cuda.decoder import PagedDecoder
from evenflow.model.cuda.graphs import mixed_graph_sizes
from evenflow.model.cuda.inputs import DeviceInputs, RowSpan
from evenflow.model.cuda.sampler import GROUP_ROWS, DeviceSampler, DeviceSequence
from evenflow.model.sampler import SampledSequence

_RESERVE = 256 << 20  # for fragmentation and later allocations of libraries


def kv_memory(decoder: PagedDecoder, *, utilization: float, max_rows: int, max_num_seqs: int, max_len: int) -> int:
    """Bytes left for KV memory beside current use and the largest steps. Negative: the model does not fit."""
    free, total = torch.cuda.mem_get_info(decoder.device)
    with torch.inference_mode():
        step = _peak(decoder, lambda: run_largest_step(decoder, max_rows, max_num_seqs, max_len))
        # Decode graphs and layer graphs each have their own memory.
        graphs = _peak(decoder, lambda: run_largest_step(decoder, max_num_seqs, max_num_seqs, max_len))
        layer_rows = max(mixed_graph_sizes(max_rows), default=0)
        graphs += _peak(decoder, lambda: run_largest_step(decoder, layer_rows, 0, max_len)) if layer_rows else 0
    torch.cuda.empty_cache()
    return int(total * utilization) - (total - free) - step - graphs - _RESERVE


def _peak(decoder: PagedDecoder, run: Callable[[], Tensor]) -> int:
    """Peak bytes of a run besides its KV memory."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    kv = run()
    return torch.cuda.max_memory_allocated(decoder.device) - before - kv.nbytes


def run_largest_step(decoder: PagedDecoder, num_rows: int, num_sampled: int, max_len: int) -> Tensor:
    """Chunks of `num_rows` rows in all, and `num_sampled` rows sampled by the most expensive rules; returns its KV."""
    lengths = [max_len] * (num_rows // max_len) + ([num_rows % max_len] if num_rows % max_len else [])
    block_size = 16
    kv = decoder.new_kv(1, block_size)
    inputs = DeviceInputs(
        num_slots=len(lengths), num_blocks=0, block_size=block_size, max_model_len=max_len, device=decoder.device
    )
    # All rows share one block: only shapes count here.
    rows = inputs.load([RowSpan(slot, 0, length, [0] * length) for slot, length in enumerate(lengths)], None)
    decoder.attention.plan(rows.layout)
    hidden = decoder.hidden(rows.inputs, kv)
    logits = decoder.logits(hidden.new_zeros(num_sampled, hidden.shape[1]))
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
    sampled = SampledSequence(params, 0, [0], 1, frozenset())
    one = DeviceSequence.of(0, sampled, 2, inputs.to_device)
    count = min(num_sampled, GROUP_ROWS)
    DeviceSampler(inputs.to_device).sample(logits, decoder.likeliest(logits), [one] * count)
    inputs.to_device(np.zeros(1)).sum().item()  # waits for all of it
    return kv

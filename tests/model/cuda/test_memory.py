"""The largest step that memory is measured by, and on a GPU what that leaves."""

from __future__ import annotations

import pytest
import torch

from evenflow.model.cuda.memory import kv_memory, run_largest_step
from tests.model.cuda.devices import CPU, CUDA_BFLOAT16, needs_cuda
from tests.model.tiny import random_tensors, tiny_config


@pytest.mark.parametrize(("rows", "longest"), [(40, 100), (250, 100), (3, 3)])
def test_the_largest_step_has_all_its_rows(rows: int, longest: int) -> None:
    config = tiny_config()
    decoder = CPU.decoder(config, random_tensors(config))
    planned = []
    plan = decoder.attention.plan
    decoder.attention.plan = lambda layout: (planned.append(layout.num_rows), plan(layout))[1]  # type: ignore[method-assign]
    with torch.inference_mode():
        kv = run_largest_step(decoder, rows, 70, longest)
    assert planned == [rows]
    assert kv.shape[1] == 1


@pytest.mark.parametrize("param", [pytest.param(None, marks=needs_cuda)])
def test_larger_steps_and_other_users_leave_less(param: None) -> None:
    config = tiny_config()
    decoder = CUDA_BFLOAT16.decoder(config, random_tensors(config))

    def left(rows: int) -> int:
        return kv_memory(decoder, utilization=0.5, max_rows=rows, max_num_seqs=64, max_len=512)

    small, large = left(64), left(1 << 18)
    assert small > large > 0
    taken = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert left(64) <= small - taken.nbytes

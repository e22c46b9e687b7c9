"""Compiles every Triton kernel for an H200 on a machine without a GPU; prints what each needs, one line of JSON each.

The interpreter accepts much that the compiler refuses. Run as a module: in a process whose kernels are interpreted,
nothing can be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.model.cuda.paged import paged_step
from tests.model.tiny import tiny_config

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_OPTIONS = ("num_warps", "num_stages")


def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Takes the place of a launch."""
    constants = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | {
        name: _type_of(value) for name, value in zip(kernel.arg_names, args, strict=False)
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, value in enumerate(args)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    line = {"kernel": kernel.__name__, "shared": compiled.metadata.shared, "spilled": _spilled(compiled.asm["cubin"])}
    print(json.dumps(line | options | {"uses_wgmma": "wgmma.mma_async" in compiled.asm["ptx"]}), flush=True)


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


def _spilled(binary: bytes) -> int:
    """Bytes of a thread's stack: registers that did not fit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [stack] = re.findall(r"STACK:(\d+)", usage)
    return int(stack)


def main() -> None:
    JITFunction.run = compile_instead
    from evenflow.model.cuda import deterministic, kernels
    from evenflow.model.cuda.attention.gather import gather_kv
    from evenflow.model.cuda.attention.merge import merge_parts
    from evenflow.model.cuda.attention.triton_chunks import TritonAttention

    half, cpu = torch.bfloat16, torch.device("cpu")
    rows, weight = torch.empty(4, 4096, dtype=half), torch.empty(4096, dtype=half)
    kernels.add_rms_norm(rows, rows, weight, 1e-5)
    kernels.silu_mul(rows)
    kernels.largest(rows.float())
    kv, slots = torch.empty(2, 2, 16, 2, 128, dtype=half), torch.zeros(4, dtype=torch.int32)
    gather_kv(kv, slots.view(1, 4), slots[:2], 64, torch.empty(2, 64, 2, 128, dtype=half))
    heads, log_sums = rows.view(4, 32, 128), torch.empty(4, 32)
    merge_parts(heads, log_sums, heads, log_sums, torch.zeros(4, 3, dtype=torch.int32))
    angles = torch.empty(4, 64)
    for norms in (None, (weight[:128], weight[:128])):
        kernels.rope_and_write_kv(rows[:, : 8 * 128].contiguous(), 4, kv, slots, (angles, angles), norms, 1e-5)

    for head_dim, dtype in ((128, half), (256, half), (80, half), (64, torch.float32)):
        config = tiny_config(num_heads=8, num_kv_heads=2, head_dim=head_dim, layer_windows=(None, 300, None, None))
        step = paged_step(config, [5000], [(4000, 8)], dtype=dtype)
        for is_deterministic in (False, True):
            backend = TritonAttention(config, dtype, cpu, is_deterministic)
            backend.plan(step.layout)
            for layer in (0, 1) if head_dim == 128 else (0,):
                backend.run(layer, step.queries, step.kv)

    for num_rows, num_inputs, num_outputs in ((64, 4096, 256), (64, 8192, 256), (256, 8192, 2048), (2048, 4096, 4096)):
        rows, weight = torch.empty(num_rows, num_inputs, dtype=half), torch.empty(num_outputs, num_inputs, dtype=half)
        deterministic.linear(rows, weight, weight[:, 0].contiguous())
    deterministic.linear(torch.empty(64, 1000), torch.empty(256, 1000))


if __name__ == "__main__":
    main()

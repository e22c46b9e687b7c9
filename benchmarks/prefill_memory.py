"""Peak memory of a prefill on this CPU: whole and in chunks, with eager and SDPA attention, each in its own process.

Two layers of SmolLM2-135M's shape with random weights, logits of the last token only. A case that does not fit in the
available memory is skipped, with the size it needs. Linux only: reads the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evenflow.advisor.memory import TABLE_TOKENS
from evenflow.host import available_memory

_HEADS = 9
_COPIES_OF_SCORES = 2.25  # eager: measured with a prompt of 8,000 tokens
_USABLE_SHARE = 0.6
_RUNS = ("whole", "chunked")


def expected_bytes(attention: str, run: str, length: int) -> float:
    rows = min(length, 2048) if run == "chunked" else length
    return rows * length * 4 * _HEADS * _COPIES_OF_SCORES if attention == "eager" else 0


def measure(attention: str, run: str, length: int) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=32768,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    if run == "chunked":
        model = ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(enable_threshold=0), "model")
    with torch.inference_mode():
        model(torch.zeros(1, 16, dtype=torch.long), logits_to_keep=1)
        tokens = torch.randint(0, 49152, (1, length))
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status_bytes("VmRSS")
        started = time.perf_counter()
        output = model(tokens, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
        layers = output.past_key_values.layers
        kv_bytes = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
        peak = _status_bytes("VmHWM") - before
    return {"peak_mb": peak / 1e6, "kv_mb": kv_bytes / 1e6, "seconds": seconds}


def _status_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def in_its_own_process(attention: str, run: str, length: int) -> dict[str, Any]:
    if (needed := expected_bytes(attention, run, length)) > _USABLE_SHARE * available_memory():
        return {"not_run": f"needs about {needed / 1e9:.0f} GB"}
    command = [sys.executable, __file__, "--case", attention, run, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("ATTENTION", "RUN", "TOKENS"), help="measure only this case")
    options = parser.parse_args()
    if options.case:
        attention, run, length = options.case
        print(json.dumps(measure(attention, run, int(length))))
        return
    for length in TABLE_TOKENS:
        for attention in ("sdpa", "eager"):
            for run in _RUNS:
                row = {"tokens": length, "attention": attention, "run": run}
                print(json.dumps({**row, **in_its_own_process(attention, run, length)}), flush=True)


if __name__ == "__main__":
    main()

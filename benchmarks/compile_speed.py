"""What ahead-of-time compilation costs and gains on this CPU: first start, second start, decoding against eager.

The default model, dequantised to float32 by transformers. Eager and compiled steps alternate; medians count.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from evenflow.compile import create_enhanced_compiler
from evenflow.model.hub.default_model import default_model_path

_CONTEXT, _STEPS = 64, 40


def step_seconds(run: Any, token: torch.Tensor, cache: Any) -> float:
    started = time.perf_counter()
    run(token, past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, help="keep compiled packages here; the first start may then find one")
    options = parser.parse_args()
    path = default_model_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = torch.randint(3, 40000, (1, _CONTEXT), generator=torch.Generator().manual_seed(0))
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "starts": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            compiler = create_enhanced_compiler(cache_dir=options.cache_dir or folder)
            compiled: Any = compiler.compile_model(model, tokens, "default")
            result["starts"] += compiler.get_performance_report()["compilations"]
    cache = model(tokens).past_key_values
    caches = [copy.deepcopy(cache), copy.deepcopy(cache)]
    token = tokens[:, :1]
    pairs = [
        [step_seconds(run, token, kept) for run, kept in zip((model, compiled), caches, strict=True)]
        for _ in range(_STEPS)
    ]
    eager, fast = (statistics.median(times[4:]) for times in zip(*pairs, strict=True))
    result |= {"eager_step_ms": eager * 1e3, "compiled_step_ms": fast * 1e3, "ratio": eager / fast}
    call = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    result["same_tokens"] = torch.equal(model.generate(tokens, **call), compiled.generate(tokens, **call))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

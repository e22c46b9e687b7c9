"""One engine on one core: says "ready", waits for a line, then prints its tokens per second, prefill included."""

from __future__ import annotations

import random
import time

from evenflow import LLM, SamplingParams

_PROMPTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 8, 128, 48

if __name__ == "__main__":
    with LLM(threads=1, enable_prefix_caching=False) as llm:
        generator = random.Random(0)
        prompts = [generator.choices(range(1000, 40_000), k=_PROMPT_TOKENS) for _ in range(_PROMPTS)]
        llm.generate(prompts[:1], SamplingParams(max_tokens=4, ignore_eos=True))
        print("ready", flush=True)
        input()
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=_OUTPUT_TOKENS, ignore_eos=True))
        print(_PROMPTS * (_PROMPT_TOKENS + _OUTPUT_TOKENS) / (time.perf_counter() - started))

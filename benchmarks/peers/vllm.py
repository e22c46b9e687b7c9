"""vLLM on CPU behind the protocol, with its defaults except prefix caching, which would answer repeats for free."""

from __future__ import annotations

import os

from peers.protocol import Generate, Job, Setup, serve


def load(setup: Setup) -> Generate:
    """The engine in this process, with its threads bound to the first cores."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(setup.model, dtype="float32", enable_prefix_caching=False, skip_tokenizer_init=True, max_model_len=8192)

    def generate(job: Job) -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    serve(load)

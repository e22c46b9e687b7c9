"""Hugging Face transformers behind the protocol: continuous batching, for any number of prompts."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from peers.protocol import Generate, Job, Setup, serve

NO_TOKEN_ID = -1
# By default, both are sized to fill the memory of the GPU or of the whole machine.
NUM_BLOCKS = 64
MAX_BATCH_TOKENS = 4096


def load(setup: Setup) -> Generate:
    """The model in float32; the first job creates the manager with its cache."""
    torch.set_num_threads(setup.threads)
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32, attn_implementation="sdpa")
    batching = ContinuousBatchingConfig(
        num_blocks=NUM_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS, allow_block_sharing=False
    )

    def generate(job: Job) -> list[list[int]]:
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=job.max_tokens, eos_token_id=NO_TOKEN_ID, pad_token_id=0
        )
        outputs = model.generate_batch(
            job.prompts, generation_config=greedy, continuous_batching_config=batching, persistent_manager=True
        )
        return [list(output.generated_tokens) for output in outputs.values()]

    return generate


if __name__ == "__main__":
    serve(load)

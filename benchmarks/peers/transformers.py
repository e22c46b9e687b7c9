"""Hugging Face transformers behind the protocol: `generate`, with several prompts as one padded batch."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from peers.protocol import Generate, Job, Setup, serve

PAD_TOKEN_ID = 0


def load(setup: Setup) -> Generate:
    """The model in float32 with torch's own attention kernel."""
    torch.set_num_threads(setup.threads)
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32, attn_implementation="sdpa")

    def generate(job: Job) -> list[list[int]]:
        width = max(len(prompt) for prompt in job.prompts)
        padding = [width - len(prompt) for prompt in job.prompts]
        token_ids = [[PAD_TOKEN_ID] * pad + prompt for pad, prompt in zip(padding, job.prompts, strict=True)]
        attention_mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=job.max_tokens, min_new_tokens=job.max_tokens, pad_token_id=PAD_TOKEN_ID
        )
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(token_ids), attention_mask=torch.tensor(attention_mask), generation_config=greedy
            )
        continuations: list[list[int]] = output[:, width:].tolist()
        return continuations

    return generate


if __name__ == "__main__":
    serve(load)

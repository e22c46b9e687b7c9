"""Speed up an evaluation of a transformers model: one line compiles it and bounds the memory of long prompts.

Run: python examples/evaluate_with_compiler.py [HUGGING_FACE_FOLDER [TOKENS_TO_GENERATE]]
Without a folder it uses a small random model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from evenflow.compile import create_enhanced_compiler_with_chunking


def load_model(arguments: list[str]) -> Any:
    if arguments:
        return AutoModelForCausalLM.from_pretrained(arguments[0], dtype=torch.float32).eval()
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def evaluate(model: Any, max_new_tokens: int) -> list[list[int]]:
    """The existing evaluation: it calls the model as before."""
    answers = []
    for length in (47, 500, 2156):  # a question, a page, a document
        prompt = torch.arange(length)[None] % 100 + 3
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
        )
        answers.append(output[0, length:].tolist())
    return answers


def main() -> None:
    arguments = sys.argv[1:]
    model = load_model(arguments)
    max_new_tokens = int(arguments[1]) if len(arguments) > 1 else 8

    compiler = create_enhanced_compiler_with_chunking(enable_chunked_prefill=True)
    examples = [list(range(3, 50)), list(range(3, 90))]  # prompts of 47 and 87 tokens
    fast_model = compiler.compile_model(model, examples, "evaluated-model")

    same = evaluate(fast_model, max_new_tokens) == evaluate(model, max_new_tokens)
    print(f"same answers: {'yes' if same else 'no'}")
    print(compiler.monitor)
    print(f"chunks: {compiler.get_chunking_stats()}")


if __name__ == "__main__":
    main()

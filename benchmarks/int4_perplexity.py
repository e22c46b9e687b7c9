"""What 4-bit weights cost in quality: perplexity of English prose in each format, beside float32.

The text is Python's language reference, which ships with Python (pydoc_data), so that anyone can repeat this:
    python benchmarks/int4_perplexity.py --tokens 4096
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import time

import torch

from evenflow.model.cpu.decoder import Decoder, MakeLinear
from evenflow.model.cpu.int4 import (
    DynamicInt4Linear,
    NativeInt4Linear,
    NativeInt8Linear,
    WeightOnlyInt4Linear,
    int4_head,
    int4_linear,
)
from evenflow.model.cpu.kv_cache import new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear
from evenflow.model.cpu.native_attention import Span
from evenflow.model.loader import LoadedModel, load_model

_TOPICS = ("objects", "naming", "class", "import", "exceptions", "with", "function", "attribute-access")
_CHUNK = 512


# name: the layers, the output head
FORMS: dict[str, tuple[MakeLinear, MakeLinear]] = {
    "float32": (FloatLinear, FloatLinear),
    "int4 as chosen on this machine": (int4_linear, int4_head),
    "native int4, native 8-bit head": (NativeInt4Linear, NativeInt8Linear),
    "x86 int4, float32 head": (WeightOnlyInt4Linear, FloatLinear),
    "x86 int4, 4-bit head": (WeightOnlyInt4Linear, WeightOnlyInt4Linear),
    "ARM int4, float32 head": (DynamicInt4Linear, FloatLinear),
}


def text_tokens(model: LoadedModel, count: int) -> list[int]:
    """The start of the text."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in _TOPICS)
    return list(model.tokenizer.encode(text))[:count]


def _perplexity(model: LoadedModel, form: tuple[MakeLinear, MakeLinear], token_ids: list[int], chunk: int) -> float:
    decoder = Decoder(model.config, model.weights, *form)
    kv = new_sequence_kv(model.config, len(token_ids))
    loss = 0.0
    for start in range(0, len(token_ids) - 1, chunk):
        fed = token_ids[start : min(start + chunk, len(token_ids) - 1)]
        logits = decoder.logits(decoder.hidden(fed, [Span(kv, start, len(fed))]))
        targets = torch.tensor(token_ids[start + 1 : start + 1 + len(fed)])
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return math.exp(loss / (len(token_ids) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=_CHUNK, help="rows per step; 1 to 8 use the decode kernels")
    parser.add_argument("--forms", nargs="*", help="which formats, by the start of their names (default: all)")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    token_ids = text_tokens(model, arguments.tokens)
    print(f"{len(token_ids)} tokens of the Python language reference, {arguments.chunk} per step")
    reference = None
    for name, form in FORMS.items():
        if arguments.forms and not name.startswith(tuple(arguments.forms)):
            continue
        began = time.perf_counter()
        with torch.inference_mode():
            perplexity = _perplexity(model, form, token_ids, arguments.chunk)
        reference = reference or perplexity
        seconds = time.perf_counter() - began
        print(f"{name:40} {perplexity:8.3f}  {perplexity / reference - 1:+.1%}  ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

"""Models for tests: the default one, small random ones of every architecture, and stories260K."""

import atexit
import json
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from evenflow.model.hub.default_model import default_model_path
from tests.shared_data import shared_path

__all__ = [
    "ARCHITECTURES",
    "CHAT_TEMPLATE",
    "VARIED_TEXTS",
    "byte_level_tokenizer",
    "default_model_path",
    "reference_model",
    "save_tokenizer",
    "stories260k_folder",
    "stories260k_vocabulary",
    "tiny_hf_folder",
    "tiny_llama",
]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)

VARIED_TEXTS = (
    "Hello, world!",
    " leading and trailing ",
    "In 1234567 years, 3.14159 and 42 will differ; it's 2024-01-31T12:00:00Z.",
    "I'm SURE they'LL say we've DONE it, he'd said.",
    "def f(x: int) -> str:\n\treturn f'{x:>10}'  # comment\n\n\n    if x == 0:\n        pass\n",
    "你好，世界！今天天气怎么样？ 日本語のテキスト 한국어",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 ½ ² Ⅳ e\u0301 \u00e9",
    "a\u00a0b\u2003c\td\r\ne\x00f",
    "     \n\n  \t ",
    "",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/path?query=1&other=two#anchor",
)

_SPECIAL_TOKENS = ("<unk>", "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(
    *splits: pre_tokenizers.PreTokenizer,
    gpt2_words: bool = True,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """A byte-level BPE of 512 tokens trained on a little text, cut as `splits` say and then into GPT-2's words."""
    tokenizer = tokenizers.Tokenizer(BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_words)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*VARIED_TEXTS, "the then there these 2000 2001 12 123 it's we're"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with a chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def reference_model(architecture: str, **changes: Any) -> Any:
    """A random model of transformers: four layers, four heads over two KV heads of 16, 512 tokens."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    if architecture != "Qwen2ForCausalLM" and architecture != "SmolLM3ForCausalLM":
        sizes["head_dim"] = 16
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**{**sizes, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start out as zeros and ones, which hides mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_hf_folder(
    folder: Path, architecture: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **changes: Any
) -> Path:
    """A Hugging Face folder as transformers writes it, of `reference_model`, with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    reference_model(architecture, **changes).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    save_tokenizer(byte_level_tokenizer(), folder)
    return folder


@cache
def tiny_llama() -> Path:
    """A small random Llama as a Hugging Face folder, made once per process; not to be changed."""
    folder = Path(tempfile.mkdtemp(prefix="evenflow-tiny-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_hf_folder(folder, "LlamaForCausalLM")


def stories260k_vocabulary() -> tuple[list[str], list[float]]:
    """The sentencepiece tokens and scores of stories260K."""
    content = shared_path("models/stories260K/tok512.bin").read_bytes()
    tokens, scores, position = [], [], 4
    while position < len(content):
        score, length = struct.unpack_from("<fi", content, position)
        position += 8
        # llama2.c writes spaces for sentencepiece's marks, and newlines around the ends of text.
        tokens.append(content[position : position + length].decode().strip("\n").replace(" ", "▁"))
        scores.append(score)
        position += length
    return tokens, scores


def stories260k_folder(folder: Path) -> Path:
    """stories260K, converted from llama2.c's format into a Hugging Face folder."""
    content = shared_path("models/stories260K/stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", content)
    head_dim = dim // heads
    shapes = {
        "embed_tokens": (vocab, dim),
        "input_layernorm": (layers, dim),
        "self_attn.q_proj": (layers, dim, dim),
        "self_attn.k_proj": (layers, kv_heads * head_dim, dim),
        "self_attn.v_proj": (layers, kv_heads * head_dim, dim),
        "self_attn.o_proj": (layers, dim, dim),
        "post_attention_layernorm": (layers, dim),
        "mlp.gate_proj": (layers, hidden, dim),
        "mlp.down_proj": (layers, dim, hidden),
        "mlp.up_proj": (layers, hidden, dim),
        "norm": (dim,),
    }
    values = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensor, values = values[:count].view(shape), values[count:]
        if len(shape) == 1 or name == "embed_tokens":
            tensors[f"model.{name}.weight"] = tensor.clone()
            continue
        for layer in range(layers):
            rows = tensor[layer]
            if name.endswith(("q_proj", "k_proj")):
                rows = rows.view(-1, head_dim // 2, 2, dim).transpose(1, 2)
            tensors[f"model.layers.{layer}.{name}.weight"] = rows.reshape(shape[1:]).clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _sentencepiece_tokenizer(*stories260k_vocabulary()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def _sentencepiece_tokenizer(tokens: list[str], scores: list[float]) -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [(left + right, left, right) for left in tokens[259:] for right in tokens[259:] if left + right in ids]
    pairs.sort(key=lambda pair: -scores[ids[pair[0]]])
    tokenizer = tokenizers.Tokenizer(
        BPE(
            vocab=ids,
            merges=[(left, right) for _, left, right in pairs],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:3]])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer

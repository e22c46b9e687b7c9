"""Writes the float32 copies of a Llama GGUF that peers need: a Hugging Face folder and an F32 GGUF file.

All engines then run the same dequantised numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import save_file

from evenflow.model.config import ModelConfig
from evenflow.model.loader import load_model


def export_hf_folder(gguf_path: Path, folder: Path) -> Path:
    """A folder with config.json, float32 safetensors and tokenizer; written on first use, in about 20 seconds."""
    if not folder.exists():
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        model = load_model(gguf_path)
        (unfinished / "config.json").write_text(json.dumps(_hf_config(model.config), indent=2))
        tensors = {_hf_name(name): tensor.contiguous() for name, tensor in model.weights.items()}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        _save_tokenizer(gguf_path, unfinished)
        unfinished.rename(folder)
    return folder


def export_f32_gguf(gguf_path: Path, target: Path) -> Path:
    """The same GGUF with every tensor dequantised to F32; written on first use, in a few seconds."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.unfinished")
        reader = gguf.GGUFReader(gguf_path)
        writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
        _copy_metadata(reader, writer)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.rename(target)
    return target


def _hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    if config.architecture != "llama" or config.rope.scaling is not None:
        raise ValueError(
            f"Got {config.architecture} with {config.rope} but only Llama models without RoPE scaling can be exported."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def _save_tokenizer(gguf_path: Path, folder: Path) -> None:
    # Imported here because it takes seconds, and a folder that exists does not need it.
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name).save_pretrained(folder)


def _copy_metadata(reader: Any, writer: Any) -> None:
    written_by_the_writer = {"general.architecture", "general.file_type"}
    for name, field in reader.fields.items():
        if name in written_by_the_writer or name.startswith("GGUF."):
            continue
        item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], item_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

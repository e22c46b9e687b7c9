"""Reads model files: Hugging Face folders and GGUF files, their tokenizers and weights."""

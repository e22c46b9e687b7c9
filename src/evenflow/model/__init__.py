"""The Llama-family decoder in torch: files, tokenizer, layers, attention, sampling."""

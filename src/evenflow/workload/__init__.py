"""Requests read from files: texts, conversations and traces. Needs neither torch nor a tokenizer."""

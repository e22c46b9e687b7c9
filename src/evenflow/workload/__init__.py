"""Requests as files hold them: texts, conversations and traces. Needs neither torch nor a tokenizer."""

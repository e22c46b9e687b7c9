"""Ollama's API: chats and texts over the same engine, for its clients."""

"""OpenAI-compatible HTTP in front of an engine process, with metrics and a live page."""

"""OpenAI's API over HTTP."""

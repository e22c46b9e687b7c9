"""Anthropic's Messages API, translated to a chat: its requests, responses and events."""

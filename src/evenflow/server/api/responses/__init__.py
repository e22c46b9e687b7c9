"""OpenAI's Responses API, translated to a chat: its requests, responses, events, and the store of past responses."""

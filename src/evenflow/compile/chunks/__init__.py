"""Runs long prompts in chunks: when to cut, how long each chunk is, and the run itself."""

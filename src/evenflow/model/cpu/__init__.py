"""The decoder on a CPU: linear layers, attention and KV memory."""

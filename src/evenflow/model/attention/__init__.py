"""Attention over the KV of each sequence, one implementation a device."""

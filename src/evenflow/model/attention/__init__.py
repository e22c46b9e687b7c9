"""Attention over the KV of each sequence, one implementation per device."""

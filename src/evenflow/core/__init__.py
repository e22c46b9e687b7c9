"""The scheduler and its parts, in pure Python: no torch, no clock, no I/O. Start with request.py."""

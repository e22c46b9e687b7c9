"""The scheduler and all it decides with: pure Python, no torch, no clock, no I/O. Start with request.py."""

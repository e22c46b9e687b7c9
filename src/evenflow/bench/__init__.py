"""Loads and the figures taken from them. Nothing here prints."""

"""Evaluates a model on task files: records, scorers, a sandbox for programs, a journal, and reports from it."""

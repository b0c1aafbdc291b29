"""Mamba2: a verify step of its recurrence, and prompt chunks."""

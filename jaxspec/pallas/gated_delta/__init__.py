"""Gated DeltaNet: what its recurrence reads, a verify step of it, and prompt chunks."""

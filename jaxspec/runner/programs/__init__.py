"""Caches on disk of traced and compiled programs, parallel tracing, and compile options."""

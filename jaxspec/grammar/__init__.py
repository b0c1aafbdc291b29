"""Grammars of structured output and of tool calls."""

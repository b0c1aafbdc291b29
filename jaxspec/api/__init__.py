"""Python API: `LLM`, `AsyncLLM`, their common base, and model loading."""

"""Text: tokenizers, chat templates, streamed detokenization, tool-call parsers. Imports no JAX."""

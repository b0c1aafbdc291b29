"""A model in a GGUF file: its metadata as a config.json, its tensors by their published names."""

"""A model in a GGUF file: its metadata as a config.json, its tensors by their published names."""

REMEDY = "Download the file again, convert it anew, or use the folder of its safetensors."
"""The way out of every error about what a file says of its model."""

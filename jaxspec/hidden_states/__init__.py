"""Extraction of hidden states: from a sample's pages on the device to a file.

pages ─▶ PageReader ─▶ HiddenStateRecorder ─▶ StateWriter ─▶ state_file
device   copies        waits for the end      a thread       safetensors
"""

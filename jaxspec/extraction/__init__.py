"""What layers made of the tokens of a sample, from its pages on the device to a file.

pages ─▶ PageReader ─▶ HiddenStateFollower ─▶ StateWriter ─▶ state_file
device   copies        waits for the end      a thread       safetensors
"""

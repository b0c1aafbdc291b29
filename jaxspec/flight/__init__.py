"""The flight recorder: what an engine was told and what it answered, so that it can run again.

A step is a pure function, so plans are all that a repetition needs beside the checkpoint.
"""

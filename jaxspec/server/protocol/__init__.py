"""What the bodies of requests may hold, as pydantic models: types and names, no rules of values.

`SamplingParams` and the tokenizer own those rules, so they hold here as in Python.
"""

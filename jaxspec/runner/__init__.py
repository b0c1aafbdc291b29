"""The step on the device, as pure functions over frozen pytrees, and the runner that executes it.

Read `step.py` first. `programs` has the caches and tracing processes of compiled programs.
"""

"""ONE STEP on the device: pure functions over frozen pytrees."""

"""Adapters of RL trainers that generate with an engine in their own process.

Each module needs the trainer's package (extra `rollouts`).
"""

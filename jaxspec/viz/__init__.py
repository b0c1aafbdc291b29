"""Visualization of generations: plots, colored tokens, timelines of steps."""

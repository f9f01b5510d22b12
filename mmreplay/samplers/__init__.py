"""Samplers: which steps to draw. `base` is the protocol, each other file one kind."""

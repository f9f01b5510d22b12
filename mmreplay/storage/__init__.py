"""Engines: how rows are kept. `base` is the protocol, each other file one kind."""

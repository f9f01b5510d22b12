"""Zarr groups of other writers, opened as read-only buffers."""

"""Zarr groups that other programs wrote, read in place."""

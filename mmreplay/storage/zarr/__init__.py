"""The Zarr engine: rows in compressed shards."""

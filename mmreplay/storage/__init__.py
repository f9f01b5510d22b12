"""Engines, which store rows; `store` is their protocol."""

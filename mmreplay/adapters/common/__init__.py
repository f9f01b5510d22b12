"""Code that several adapters share.

- `location`: the folder of an adapter's buffer, and pickling by its path
- `values`: values of other libraries as arrays
- `tensors`: named tensors as fields
- `lazy`: names of a package that load on first use
"""

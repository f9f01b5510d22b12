"""Faces of other libraries' replay memories, over one `ReplayBuffer` each.

Code written for such a library trains from disk by another import and a path. Import
the module of the library that you use, such as `mmreplay.adapters.sb3`; it needs that
library, and no other module does. What differs is told in docs/migrating.
"""

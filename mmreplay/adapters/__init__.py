"""Interfaces of other libraries' replay memories, over one `ReplayBuffer` each.

Code written for such a library trains from disk with another import and a path. Import
the module of your library, such as `mmreplay.adapters.sb3`. Only that module needs the
library. docs/migrating lists the differences.
"""

"""The main job from end to end: record, kill a writer, reopen, train.

``python -m tools.demo [folder]`` keeps the buffer where a folder is given. Each
part runs in a process of its own, and meets the others in that folder alone:
`record` plays Atari into a ring that wraps, `crash` is killed while it writes and
looks for what it had published, `learn` trains from it.
"""

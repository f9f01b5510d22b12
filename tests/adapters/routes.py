"""The two routes of a step through an adapter, one after the other."""

from mmreplay.buffer.replay_buffer import ReplayBuffer


def each_route(monkeypatch, counts):
    """Yield `"short"`, then `"long"`, while steps may go that way alone.

    `counts` gets the number of steps that were handed on unchanged under each.
    """
    short = ReplayBuffer.try_add
    for way in ("short", "long"):
        counts[way] = 0

        def try_add(self, data, published=None, way=way):
            found = short(self, data, published) if way == "short" else None
            counts[way] += found is not None
            return found

        monkeypatch.setattr(ReplayBuffer, "try_add", try_add)
        yield way

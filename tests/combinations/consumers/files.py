"""Buffers as files of other formats, and back."""

from itertools import groupby

import numpy as np

import mmreplay as mr
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.finished import finished, reader_of
from mmreplay.convert.registry import named, open_appender
from tests.combinations.build import ARRAYS, FORMATS
from tests.combinations.compare import assert_column, assert_refusal, assert_rows, refused
from tests.combinations.consumers.rows import started


def exported(name):
    """A consumer that exports a buffer to a format and loads it again."""

    def look(built, rng):
        file, target = built.new_path(FORMATS[name]), built.new_path("loaded")
        kinds = set(built.fields.values())
        if name == "csv" and "bfloat16" in kinds:
            try:
                mr.export(built.buffer, file)
            except mr.ReplayError as error:
                assert_refusal(error)
                assert not file.exists()
                return
            raise AssertionError("csv has no bfloat16, and was not refused")
        # csv holds no images unless it must.
        options = {"force": True} if name == "csv" and "large" in kinds else {}
        report = mr.export(built.buffer, file, **options)
        assert report.rows == len(built.twin.alive())
        mr.load(file, target)
        with mr.ReplayBuffer.open(target) as loaded:
            assert_rows(built.twin, loaded.gather_all())
            assert started(loaded) == built.twin.legal()
            schema = built.buffer.schema
            assert loaded.schema == (schema.drawn if name in ARRAYS else schema)
        findings = mr.verify_buffer(target).findings
        assert [found.message for found in findings if found.damage] == []

    return look


def assert_set(built, folder, steps):
    """A LeRobot set that is loaded again has these steps of the twin, and no others."""
    target = built.new_path("loaded")
    mr.load(folder, target)
    with mr.ReplayBuffer.open(target) as loaded:
        rows = loaded.gather_all()
        stored = [built.twin.stored(index) for index in steps]
        assert loaded.schema == built.buffer.schema.drawn
        assert len(rows) == len(steps)
        for path in loaded.schema.paths:
            if path not in ("terminated", "truncated"):
                assert_column(path, rows[path], [values[path] for values in stored])
        for end in ("terminated", "truncated"):
            ends = np.asarray(rows[end]).reshape(len(steps), -1)
            if built.twin.agents is None:
                wanted = [getattr(built.twin.row(index), end) for index in steps]
                assert ends[:, 0].tolist() == wanted, end


def to_lerobot(built, rng):
    """All steps become a set, or a sentence says why not."""
    folder, steps = built.new_path("set"), built.twin.steps()
    fields = built.buffer.schema.fields.values()
    if not steps or any(field.drawn.varies and field.kind != "text" for field in fields):
        with refused(mr.ReplayError):
            mr.export(built.buffer, folder, format="lerobot", fps=10, video=False)
        assert not folder.exists()
        return
    report = mr.export(built.buffer, folder, format="lerobot", fps=10, video=False)
    assert report.episodes >= len({built.twin.row(index).episode for index in steps}) > 0
    assert_set(built, folder, steps)


def appended(built, rng):
    """Finished episodes are appended in two turns, each once, and no others."""
    twin, folder = built.twin, built.new_path("set")
    if any(f.drawn.varies and f.kind != "text" for f in built.buffer.schema.fields.values()):
        return
    description = BufferReader(built.buffer).describe()
    first, stop = description.first, description.stop
    turns = [first + rng.integers(0, stop - first + 1), stop]
    appender = open_appender(
        named("lerobot"), folder, description, overwrite=False, fps=10, video=False
    )
    for upto in turns:
        found = finished(BufferReader(built.buffer), appender.appended, upto)
        if found.episodes:
            appender.append(reader_of(BufferReader(built.buffer), found), found.appended)
    appender.close()
    episodes = []
    for _, group in groupby(twin.steps(), key=lambda index: (index[0], twin.row(index).episode)):
        indices = list(group)
        (env_id, position), last = indices[0], twin.row(indices[-1])
        before = twin.envs[env_id].rows[position - 1] if position else None
        if last.ended and (before is None or before.episode != last.episode):
            # The row after it may be what says that it was truncated.
            own = any(twin._ends(last.values))
            episodes.append((env_id, indices[-1][1] + 1 + (not own), indices))
    early = [each for env_id, over, each in episodes if over <= turns[0][env_id]]
    late = [each for env_id, over, each in episodes if over > turns[0][env_id]]
    if episodes:
        assert_set(built, folder, [index for each in early + late for index in each])
    assert folder.exists() == bool(episodes)


CONSUMERS = {f"export to {name}": exported(name) for name in FORMATS}
CONSUMERS |= {"export to lerobot": to_lerobot, "append to lerobot": appended}

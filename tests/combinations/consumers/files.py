"""Buffers as files of other formats, and back."""

import mmreplay as mr
from tests.combinations.build import FORMATS
from tests.combinations.compare import assert_refusal, assert_rows
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
            assert loaded.schema == built.buffer.schema
        findings = mr.verify_buffer(target).findings
        assert [found.message for found in findings if found.damage] == []

    return look


CONSUMERS = {f"export to {name}": exported(name) for name in FORMATS}

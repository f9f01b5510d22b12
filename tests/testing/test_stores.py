"""`check_store` passes the built-in engines and refuses broken ones with a reason."""

from contextlib import suppress

import numpy as np
import pytest

from mmreplay.errors import FailedError, FullError
from mmreplay.storage.layout import record_layout
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.memory import MemoryStore
from mmreplay.testing import STORE_RULES, ContractError, check_store
from mmreplay.testing.stores import ENDS, STORED


def test_a_store_in_ram_passes_in_a_temporary_folder():
    check_store(lambda ring, schema, folder: MemoryStore(ring, schema))


class Ones(MemoryStore):
    def flags(self, rows, new=False):
        return super().flags(rows, new) | 1


class NoRecords(MemoryStore):
    def __init__(self, ring, schema):
        super().__init__(ring, schema)
        del self.records


class NoLimitStep(MemoryStore):
    def __init__(self, ring, schema):
        super().__init__(ring, schema)
        del self.limit_step


class StoresOthers(MemoryStore):
    def stored(self, rows, paths):
        return super().stored(rows[::-1], paths)


class SealsOne(MemoryStore):
    def sealed(self, rows):
        return np.zeros(1, bool)


class MapsBackwards(MemoryStore):
    def map_field(self, path):
        rows = self._arrays[path][::-1]
        if self.ring.layout == "time_major":
            return rows.reshape(self.ring.slots, self.ring.num_envs, *rows.shape[1:])
        envs = rows.reshape(self.ring.num_envs, self.ring.slots, *rows.shape[1:])
        return envs.swapaxes(0, 1)


class StrayHeap(MemoryStore):
    def __init__(self, ring, schema):
        super().__init__(ring, schema, heap_nbytes=4096)


class Placed(MemoryStore):
    def __init__(self, ring, schema):
        super().__init__(ring, schema)
        self.placement = record_layout(schema)


class StrayRecords(MemoryStore):
    def __init__(self, ring, schema):
        super().__init__(ring, schema)
        self.records = self


class Rounds(MemoryStore):
    def write(self, runs, columns, flags):
        columns = dict(columns)
        columns["float64s"] = np.trunc(columns["float64s"])
        super().write(runs, columns, flags)


class Drops(MemoryStore):
    def gather(self, rows, paths):
        return super().gather(rows, [path for path in paths if path != "int8"])


class Numbers(MemoryStore):
    def write(self, runs, columns, flags):
        columns = dict(columns)
        values = np.array(columns["float32"])
        values[np.isnan(values)] = np.nan
        columns["float32"] = values
        super().write(runs, columns, flags)


class Axes(MemoryStore):
    """Takes the first axis for rows, whatever it is."""

    def write(self, runs, columns, flags):
        columns = dict(columns)
        if len(columns["pixels"]) != len(flags):
            columns["pixels"] = np.repeat(columns["pixels"][:1], 64, 0)
        super().write(runs, columns, flags)


class Raw(MemoryStore):
    """Reads the memory behind a strided column from its first byte on."""

    def write(self, runs, columns, flags):
        columns = dict(columns)
        values = columns["int64"]
        if values.ndim and values.strides[0] < 0:
            columns["int64"] = values[::-1].copy()
        super().write(runs, columns, flags)


class Views(MemoryStore):
    """Returns the same array from each gather."""

    array = None

    def gather(self, rows, paths):
        found = super().gather(rows, paths)
        if self.array is not None and "pixels" in found:
            self.array[...] = 0
        self.array = found.get("pixels")
        return found

    def write(self, runs, columns, flags):
        super().write(runs, columns, flags)
        if self.array is not None:
            self.array[...] = 0


class Late(MemoryStore):
    """Copies what was written at the next call."""

    last = None

    def write(self, runs, columns, flags):
        self.last = (runs, columns, flags)

    def gather(self, rows, paths):
        if self.last:
            super().write(*self.last)
        return super().gather(rows, paths)


class More(MemoryStore):
    def gather(self, rows, paths):
        return super().gather(rows, [*paths, *({"int8"} - {*paths})])


class Backwards(MemoryStore):
    def flags_between(self, env_id, first, stop):
        return super().flags_between(env_id, first, stop)[::-1]


class SetsOne(MemoryStore):
    def set(self, path, rows, values):
        super().set(path, rows[:1], values[:1])


class Prepares(MemoryStore):
    def prepare(self, data):
        return 0

    def write_prepared(self, runs, flags):
        pass


class Reserves(MemoryStore):
    def allocate(self, first, stop):
        self.write([(0, 0, 1)], {}, np.ones(1, np.uint8))

    def write(self, runs, columns, flags):
        if columns:
            super().write(runs, columns, flags)
        else:
            self.all_flags[0] = 1


class Prefetches(MemoryStore):
    def prefetch(self, rows, paths, now=False):
        self.set("returns", rows, np.ones(len(rows), np.float32))
        return 0


class NoBytes(MemoryStore):
    def disk_nbytes(self):
        return 0, 0


class ClosesOnce(MemoryStore):
    closed = False

    def close(self):
        super().close()
        assert not self.closed, "closed twice"
        self.closed = True


def in_ram(kind):
    def make(ring, schema, folder):
        return kind(ring, schema)

    return make, None


class Forgetful(MemmapStore):
    """Gives its flags to the next opening as zeros."""

    def close(self):
        rows = np.arange(self.ring.num_rows)
        if not self.closed_already:
            self.closed_already = True
            values = {**self.gather(rows, STORED), **dict.fromkeys(ENDS, rows > 0)}
            self.write([(0, 0, len(rows))], values, np.zeros(len(rows), np.uint8))
        super().close()

    closed_already = False


class Summed(MemmapStore):
    """Sums no large field."""

    def checksum(self, env_id, block):
        return block


class Lapless(MemmapStore):
    def read_sum(self, env_id, block):
        return super().read_sum(env_id, block)[0], 0


class Everything(MemmapStore):
    def checksum(self, env_id, block):
        rows = self.ring.rows(np.array([env_id]), np.array([block]))
        values = self.gather(rows, ["returns"])["returns"]
        return super().checksum(env_id, block) ^ int(values.view(np.uint32)[0])


class Swallows(MemmapStore):
    """Takes the errors of a write for a success."""

    def write(self, runs, columns, flags):
        with suppress(FailedError, FullError):
            super().write(runs, columns, flags)


class Misplaced(MemmapStore):
    """Writes rows in the opposite order."""

    def write(self, runs, columns, flags):
        columns = {path: column[::-1].copy() for path, column in columns.items()}
        super().write(runs, columns, flags)


class Bare(MemmapStore):
    """Raises what the system raised."""

    def sync(self):
        try:
            super().sync()
        except (FailedError, FullError) as error:
            raise OSError(error.errno, "bare") from error


class Hidden(MemoryStore):
    """Goes past mmreplay.disk."""

    def checksum(self, env_id, block):
        return 0

    def write_sums(self, env_id, first, sums):
        pass

    def sync_sums(self):
        pass


def on_disk(kind):
    def make(ring, schema, folder):
        return kind.create_rows(folder, ring, schema)

    def reopen(ring, schema, folder):
        return kind.open_rows(folder, ring, schema, writable=True)

    return make, reopen


def hidden():
    make, _ = in_ram(Hidden)
    return make, make


def hidden_sums():
    make, _ = in_ram(MemoryStore)
    return make, make


BROKEN = [
    (in_ram(Ones), "new_stores_hold_zeros", "flags of a new store differs"),
    (in_ram(NoRecords), "nothing_is_missing", "no 'records'"),
    (in_ram(NoLimitStep), "nothing_is_missing", "no 'limit_step'"),
    (in_ram(StrayHeap), "heap_and_records_are_those_of_the_fields", "heap is MemoryHeap where"),
    (in_ram(StrayRecords), "heap_and_records_are_those_of_the_fields", "packed has no path"),
    (in_ram(Placed), "files_hold_rows_where_they_are_placed", r"but files has \[\]"),
    (on_disk(Misplaced), "files_hold_rows_where_they_are_placed", "of records.bin differs"),
    (hidden_sums(), "nothing_is_missing", "no 'checksum'"),
    (in_ram(StoresOthers), "stored_rows_are_those_written", "of stored rows differs"),
    (in_ram(SealsOne), "stored_rows_are_those_written", r"sealed returned bool\[1\]"),
    (in_ram(MapsBackwards), "mapped_fields_show_rows", "mapped field 'bool' differs"),
    (in_ram(Rounds), "rows_come_back_bit_for_bit", "field 'float64s' of .* differs"),
    (in_ram(Drops), "rows_come_back_bit_for_bit", r"gather returned \['bfloat16'"),
    (in_ram(Numbers), "floats_keep_their_bits", "field 'float32' of special floats"),
    (in_ram(Axes), "a_single_row_needs_no_axis", "of a single row"),
    (in_ram(Raw), "columns_may_be_strided", "field 'int64' of strided columns differs"),
    (in_ram(Views), "what_was_read_is_a_copy", "'pixels' of an earlier gather differs"),
    (in_ram(Late), "what_was_written_may_change", "changed after the write differs"),
    (in_ram(More), "fields_are_read_alone", r"gather returned \['.*int8"),
    (in_ram(Backwards), "flags_between_cross_the_wrap", r"flags_between\(.* differs"),
    (in_ram(SetsOne), "set_changes_one_field", "after set of 'returns' differs"),
    (in_ram(Prepares), "prepared_steps_are_written", "of a prepared step differs"),
    (in_ram(Reserves), "space_can_be_reserved", "flags after allocate differs"),
    (in_ram(Prefetches), "reading_ahead_changes_nothing", "after prefetch differs"),
    (in_ram(NoBytes), "any_schema_is_stored", r"disk_nbytes is \(0, 0\)"),
    (in_ram(ClosesOnce), "closing_twice_is_harmless", "the second close raised"),
    (on_disk(Forgetful), "synced_rows_are_reopened", "flags after another opening"),
    (on_disk(Summed), "checksums_show_changes", "1 checksums of a block that was"),
    (on_disk(Everything), "checksums_show_changes", "changed with a mutable field"),
    (on_disk(Lapless), "checksums_show_changes", r"are read as \[\(11, 0\)"),
    (on_disk(Swallows), "failed_disk_calls_are_errors", "nothing was raised"),
    (on_disk(Bare), "failed_disk_calls_are_errors", r"raised OSError \(\[Errno"),
    (hidden(), "failed_disk_calls_are_errors", "without a call of mmreplay.disk"),
]


@pytest.mark.parametrize(("makers", "rule", "message"), BROKEN)
def test_a_broken_store_is_refused(makers, rule, message, tmp_path):
    make, reopen = makers
    with pytest.raises(ContractError, match=f"(?s)breaks rule '{rule}' .*{message}"):
        check_store(make, tmp_path, open_store=reopen, rules=[rule])


def test_every_rule_has_a_store_that_breaks_it():
    assert set(STORE_RULES) == {rule for _, rule, _ in BROKEN}

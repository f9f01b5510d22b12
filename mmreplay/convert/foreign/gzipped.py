"""npy arrays in gzip files, read forward in pieces."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from mmreplay.convert import npy
from mmreplay.convert.arrays import native
from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.convert.foreign.columns import Array
from mmreplay.convert.zips import MAX_EXPANSION
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.files import File
from mmreplay.schema.dtypes import canonical_name

PIECE_NBYTES = 1 << 18
SKIP_NBYTES = 1 << 20


class Gzip:
    """An npy array in a gzip file, read forward; see `columns.Rows`.

    A step back begins at the file's first byte again.
    """

    def __init__(self, path: Path, allow_expansion: bool) -> None:
        """Open a file, which is closed by `close`.

        Raises:
            FormatError: It holds no array of numbers, or claims to hold too many.
            CorruptError: It is damaged.
        """
        self.file = File.open(path, None)
        try:
            self._begin()
            self._check(allow_expansion)
        except BaseException:
            self.file.close()
            raise

    def _begin(self) -> None:
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._at, self._got, self._rest = 0, 0, b""
        what = f"{self.file.path}: its content"
        head = self._take(12)
        total = npy.prefix_nbytes(head, what)
        self._header = npy.parse(head + self._take(max(0, total - 12)), what)
        self._row = 0

    def _check(self, allow_expansion: bool) -> None:
        header, path = self._header, self.file.path
        if header.columns_first and len(header.shape) > 1:
            raise FormatError(
                f"{path} lies in Fortran order, expected C order; save "
                "numpy.ascontiguousarray of it"
            )
        try:
            self.dtype = canonical_name(header.dtype)
        except SchemaError as error:
            raise FormatError(f"{path}: {error}") from error
        self.shape: tuple[int, ...] = header.shape[1:]
        self.count = header.shape[0] if header.shape else 0
        nbytes = header.data_nbytes
        if nbytes > MAX_EXPANSION * max(self.file.nbytes, 1 << 10) and (
            not allow_expansion
        ):
            raise FormatError(
                f"{path} says that {self.file.nbytes} bytes hold {nbytes}, expected at "
                f"most {MAX_EXPANSION} times as many; pass allow_expansion=True if you "
                "trust it"
            )
        if nbytes > MAX_ROW_NBYTES * max(1, self.count):
            raise FormatError(
                f"{path} says rows of {nbytes // max(1, self.count)} bytes, expected "
                f"at most {MAX_ROW_NBYTES}"
            )

    def _take(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            if not self._rest and self._at < self.file.nbytes:
                size = min(PIECE_NBYTES, self.file.nbytes - self._at)
                self._rest = self.file.pread(size, self._at)
                self._at += size
            try:
                data = self._inflate.decompress(self._rest, len(view) - done)
            except zlib.error as error:
                raise self._damaged(str(error)) from error
            self._rest = self._inflate.unconsumed_tail
            if (
                not data
                and not self._rest
                and (self._inflate.eof or self._at == self.file.nbytes)
            ):
                raise self._damaged("its end")
            view[done : done + len(data)] = data
            done += len(data)
        self._got += done

    def _damaged(self, got: str) -> CorruptError:
        return CorruptError(
            f"{self.file.path}: got {got} near byte {self._at}, after {self._got} "
            "unpacked ones, expected a whole gzip file of an npy array; it was cut or "
            "damaged: restore it from a copy"
        )

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        if first < self._row:
            self._begin()
        found = np.empty((stop - first, *self.shape), self._header.dtype)
        row_nbytes = found.nbytes // max(1, len(found))
        self._skip((first - self._row) * row_nbytes)
        if found.size:
            self._fill(found.reshape(-1).view(np.uint8).data)
        self._row = stop
        if stop == self.count:
            self._finish()
        return native(found, self.dtype)

    def number(self) -> int:
        """The one number that the file holds, at least 0.

        Raises:
            FormatError: It holds something else.
        """
        header = self._header
        if header.shape or header.dtype.kind not in "iu":
            raise FormatError(
                f"{self.file.path} holds {header.dtype}{list(header.shape)}, expected "
                "one integer; the file is damaged"
            )
        found = int(np.frombuffer(self._take(header.data_nbytes), header.dtype)[0])
        if found < 0:
            raise FormatError(
                f"{self.file.path} says {found}, expected a count; it is damaged"
            )
        return found

    def _skip(self, nbytes: int) -> None:
        while nbytes > 0:
            nbytes -= len(self._take(min(SKIP_NBYTES, nbytes)))

    def _finish(self) -> None:
        """Read the checksum that stands behind the last byte."""
        while not self._inflate.eof:
            if not self._rest and self._at == self.file.nbytes:
                raise self._damaged("no checksum")
            size = min(PIECE_NBYTES, self.file.nbytes - self._at)
            self._rest += self.file.pread(size, self._at)
            self._at += size
            try:
                more = self._inflate.decompress(self._rest, 1)
            except zlib.error as error:
                raise self._damaged(str(error)) from error
            if more:
                raise self._damaged("more bytes than its header says")
            self._rest = self._inflate.unconsumed_tail

    def close(self) -> None:
        """Give the file back."""
        self.file.close()

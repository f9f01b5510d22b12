"""Writes the page to a folder that opens from disk, without a server.

The saved page is the same files as the served one. A browser loads no data from
``file://`` but scripts: the answers of the server are written as ``data-NNN.js``, which
call ``mmr.saved(key, type, base64)``. A key is a request's path and its parameters in
alphabetical order, so that the page looks answers up by what it would request.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from mmreplay.convert.ranges import RowRanges, read_ranges
from mmreplay.convert.staging import Staging
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import FailedError, FormatError, SchemaError, called
from mmreplay.page import faults
from mmreplay.page.api import OK, Page, PageAnswer, Shown
from mmreplay.page.curves import MAX_NBYTES as MAX_CURVE_NBYTES
from mmreplay.page.curves import MAX_VALUES_ROWS
from mmreplay.page.episodes import (
    MAX_LISTED_REWARDS,
    EpisodeColumns,
    histogram_of_episodes,
    table_rows,
)
from mmreplay.page.frames import layouts
from mmreplay.page.requests import Refusal
from mmreplay.page.static_files import static_files
from mmreplay.page.varying import numbers_of
from mmreplay.page.wire import JSON_TYPE, encode_json
from mmreplay.stats import Progress

NEWEST, MAX_EPISODES = 4, 64
"""Of each buffer: newest episodes, and all episodes, that are saved."""
MAX_STEPS = 20_000
"""Of a longer episode no frames and no values are saved past so many steps."""
BUCKETS = 2048
COMPONENTS, MAX_COMPONENTS = 8, 64
"""Of one curve, and of all curves of a field."""
FRAMES, SIDE = 32, 240
MAX_NBYTES = 96 << 20
FILE_NBYTES = 4 << 20
MARK = "<!-- data -->"


@dataclass(slots=True)
class SaveReport:
    """What was saved.

    Attributes:
        episodes: Episodes that were saved.
        total: Episodes of the buffers.
        nbytes: Bytes of the folder.
        notes: What was left out, and why.
        missing: Answers that the page refused, whose screens say nothing.
    """

    episodes: int = 0
    total: int = 0
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    missing: int = 0


def save_page(
    page: Page, folder: Path, select: Path | None = None, progress: Progress | None = None
) -> SaveReport:
    """Write a page; the folder appears whole or not at all.

    Without a selection the newest episodes, the best, the worst and the longest one of
    each buffer are saved.

    Args:
        page: Its answers.
        folder: A new folder.
        select: A selection of rows, whose episodes are saved of the buffer that it
            was made from; of the first one where it does not say which.
        progress: Called with (episodes saved, episodes to save).

    Raises:
        FormatError: The folder exists or is inside a buffer, or the selection is none.
        SchemaError: The selection is of a buffer that is not on the page.
        FailedError: A buffer cannot be read.
    """
    ranges = None if select is None else read_ranges(select)
    chosen = None if ranges is None else (_selected(page, ranges.uuid), ranges)
    report = SaveReport()
    if os.path.lexists(folder):
        raise FormatError(f"{folder} already exists. Choose another folder.")
    for shown in page.shown:
        path = shown.buffer.path
        if path.resolve() in folder.resolve().parents:
            raise FormatError(f"{folder} is inside the buffer {path}. Choose another folder.")
    staging = Staging(folder, folder=True)
    try:
        names = []
        with faults.Watch() as watch:
            for number, text in enumerate(_data_files(page, chosen, report, progress)):
                name = f"data-{number:03}.js"
                _write(staging.path / name, text)
                names.append(name)
        if watch.faulted:
            raise FailedError(faults.TEXT)
        files.make_folder(staging.path / "static")
        for name, (data, _) in sorted(static_files().items()):
            if name == "index.html":
                scripts = "".join(f'<script defer src="{n}"></script>\n' for n in names)
                index = data.decode().replace(MARK, scripts)
                _write(staging.path / name, index.encode())
                continue
            path = staging.path / "static" / name
            for parent in [*path.relative_to(staging.path).parents][-2::-1]:
                files.make_folder(staging.path / parent, exist_ok=True)
            _write(path, data)
        report.nbytes = staging.publish()
    finally:
        staging.abort()
    return report


def _selected(page: Page, uuid: str) -> int:
    """Return the number of the buffer that a selection was made from.

    Args:
        page: Its buffers.
        uuid: Hex name of the buffer; ``""`` for the first one.

    Raises:
        SchemaError: It is not on the page.
    """
    if not uuid:
        return 0
    known = []
    for number, shown in enumerate(page.shown):
        try:
            known.append(shown.buffer.buffer().metadata.uuid.hex())
        except Refusal:
            continue
        if known[-1] == uuid:
            return number
    raise SchemaError(
        f"select is of the buffer {uuid}, and the page shows {', '.join(known)}. Pass "
        "the path of the buffer that it was saved from."
    )


def _write(path: Path, data: bytes) -> None:
    file = File.create(path, len(data))
    try:
        file.pwrite(data, 0)
    finally:
        file.close()


def _data_files(
    page: Page, ranges: tuple[int, RowRanges] | None, report: SaveReport, progress: Progress | None
) -> Iterator[bytes]:
    """Scripts of a few MiB that hold all answers."""
    lines: list[bytes] = []
    nbytes = 0
    for key, media_type, body in _answers(page, ranges, report, progress):
        data = base64.b64encode(body).decode()
        line = f'mmr.saved({json.dumps(key)},{json.dumps(media_type)},"{data}");\n'
        # A script that is read as text must not end early, nor begin a comment.
        line = line.replace("<", "\\u003c")
        lines.append(line.encode())
        nbytes += len(line)
        if nbytes >= FILE_NBYTES:
            yield b"".join(lines)
            lines, nbytes = [], 0
    if lines:
        yield b"".join(lines)


def key_of(path: str, **parameters: object) -> tuple[str, str]:
    """Return the key of an answer, and the query that makes it."""
    query = urlencode(sorted((name, str(value)) for name, value in parameters.items()))
    return (f"{path}?{query}" if query else path), query


class _Saver:
    """Asks the page for answers, and counts their bytes and those that are refused."""

    def __init__(self, page: Page, report: SaveReport) -> None:
        self.page = page
        self.report = report
        self.nbytes = 0
        self._noted: set[tuple[str, str]] = set()

    def answer(self, path: str, **parameters: object) -> tuple[str, str, bytes] | None:
        """Return key, type and body of an answer; None for one that is refused."""
        key, query = key_of(path, **parameters)
        found: PageAnswer = self.page.answer(path, query)
        if found.status != OK:
            number, screen = path.split("/")[3:]
            name = self.page.shown[int(number)].buffer.name
            reason = json.loads(found.body)["error"]
            if (name, screen) not in self._noted:
                # Of the curves of a field, say, one reason is enough.
                self._noted.add((name, screen))
                self.report.notes.append(f"{name}: {screen} is missing. {reason}")
            self.report.missing += 1
            return None
        self.nbytes += len(found.body)
        return key, found.media_type, found.body


def _answers(
    page: Page, ranges: tuple[int, RowRanges] | None, report: SaveReport, progress: Progress | None
) -> Iterator[tuple[str, str, bytes]]:
    """Keys, types and bodies of all answers of a saved page."""
    saver = _Saver(page, report)
    states = [{**state, "rate": None, "pid": None} for state in page.states()]
    buffers = {"buffers": states, "sampler": page.sampler}
    yield "/api/buffers", JSON_TYPE, encode_json(buffers)
    settings = {
        "buckets": BUCKETS,
        "components": COMPONENTS,
        "frames": FRAMES,
        "side": SIDE,
        "values": MAX_VALUES_ROWS,
    }
    yield "settings", JSON_TYPE, encode_json(settings)
    chosen = _chosen(page, ranges, report)
    total, done = sum(len(rows) for *_, rows in chosen), 0
    for number, shown, columns, rows in chosen:
        base = f"/api/b/{number}"
        found = saver.answer(f"{base}/overview")
        if found:
            report.notes += [
                f"{shown.buffer.name}: {check['title']}. {check['text']}"
                for check in json.loads(found[2])["checks"]
                if check["failed"]
            ]
            yield found
        yield f"{base}/episodes", JSON_TYPE, encode_json(_table(shown, columns, rows))
        for other in range(len(page.shown)):
            if other != number and (found := saver.answer(f"{base}/compare", c=other)):
                yield found
        for row in rows:
            if saver.nbytes > MAX_NBYTES:
                report.notes.append(
                    f"more than {MAX_NBYTES >> 20} MiB: the last {total - done} "
                    "episodes were left out"
                )
                return
            yield from _episode(saver, base, shown, columns, row)
            done += 1
            report.episodes = done
            if progress is not None:
                called("progress", progress, done, total)
        if page.sampler and (found := saver.answer(f"{base}/draws", sampler=page.sampler, seed=0)):
            yield found


def _chosen(
    page: Page, ranges: tuple[int, RowRanges] | None, report: SaveReport
) -> list[tuple[int, Shown, EpisodeColumns, list[int]]]:
    """Number, buffer, all episodes and rows of those to save, of each buffer.

    Raises:
        FailedError: A buffer has none that can be saved.
    """
    chosen: list[tuple[int, Shown, EpisodeColumns, list[int]]] = []
    for number, shown in enumerate(page.shown):
        here = ranges[1] if ranges is not None and ranges[0] == number else None
        try:
            columns, rows = _choose(shown, here, report)
        except Refusal as refusal:
            raise FailedError(f"{shown.buffer.path} cannot be saved: {refusal.text}") from refusal
        chosen.append((number, shown, columns, rows))
        report.total += len(columns)
    if ranges is None and any(len(rows) < len(columns) for *_, columns, rows in chosen):
        report.notes.append(
            f"of each buffer the {NEWEST} newest whole episodes, the best, the worst "
            "and the longest one, and the newest are saved. Select others on the page, "
            f"up to {MAX_EPISODES}, and pass --select selection.json."
        )
    return chosen


def _table(shown: Shown, columns: EpisodeColumns, rows: list[int]) -> dict[str, Any]:
    """The table of the episodes that are saved, as JSON values."""
    return {
        "total": len(rows),
        "all": len(columns),
        "offset": 0,
        "done": 1.0,
        "rows": table_rows(columns, np.array(rows, np.int64), _is_live(shown)),
        "histograms": {
            measure: histogram_of_episodes(columns, measure).to_json()
            for measure in ("return", "length")
        },
    }


def _is_live(shown: Shown) -> bool:
    return shown.buffer.writer(shown.buffer.buffer()) == "live"


def _choose(
    shown: Shown, ranges: RowRanges | None, report: SaveReport
) -> tuple[EpisodeColumns, list[int]]:
    """Rows of the episodes to save, in the order of the table."""
    columns, newest = shown.episodes.newest(4096)
    if not len(columns):
        return columns, []
    # Histograms and comparisons are of all returns.
    while not columns.known.all():
        columns.read(shown.buffer.buffer(), columns.unknown_slice())
    if ranges is not None:
        ends = columns.begin + columns.lengths
        rows: list[int] = []
        for env_id, first, stop in zip(
            ranges.env_ids.tolist(), ranges.first.tolist(), ranges.stop.tolist(), strict=True
        ):
            inside = (columns.env_ids == env_id) & (columns.begin < stop)
            found = np.flatnonzero(inside & (ends > first)).tolist()
            if not found:
                later = env_id < len(columns.heads) and first >= columns.heads[env_id]
                why = "are not written yet" if later else "are not in the buffer any more"
                text = f"positions {first:,} to {stop:,} of environment {env_id} {why}"
                if env_id >= len(columns.heads):
                    text = f"there is no environment {env_id} in the buffer"
                report.notes.append(text)
            rows += found
        rows = sorted(set(rows))
        if len(rows) > MAX_EPISODES:
            report.notes.append(
                f"{len(rows):,} episodes are selected: the first {MAX_EPISODES} of them were saved"
            )
            rows = rows[:MAX_EPISODES]
        columns.read(shown.buffer.buffer(), np.array(rows, np.int64))
        return columns, rows
    rows = [int(columns.ages(np.arange(len(columns))).argmin())]
    if len(newest):
        order = np.argsort(columns.ages(newest), kind="stable")
        rows += newest[order[:NEWEST]].tolist()
        returns = columns.returns[newest]
        known = newest[np.isfinite(returns)]
        if len(known):
            finite = columns.returns[known]
            rows += [int(known[finite.argmax()]), int(known[finite.argmin()])]
        rows.append(int(newest[columns.lengths[newest].argmax()]))
    return columns, sorted(set(rows))


def _episode(
    saver: _Saver, base: str, shown: Shown, columns: EpisodeColumns, row: int
) -> Iterator[tuple[str, str, bytes]]:
    """The answers that show one episode."""
    env_id, begin = int(columns.env_ids[row]), int(columns.begin[row])
    end = begin + int(columns.lengths[row])
    found = saver.answer(f"{base}/episode", env=env_id, at=begin, listed=MAX_LISTED_REWARDS)
    if found:
        # The page asks without a number.
        key, _ = key_of(f"{base}/episode", env=env_id, at=begin)
        yield key, *found[1:]
    buffer = shown.buffer.buffer()
    images = layouts(buffer, shown.buffer.images)
    # The row after the last step, too, where there is one: it may be a final row.
    stop = min(end + 1, begin + MAX_STEPS, int(buffer.span.stop[env_id]))
    for first in range(begin, stop, MAX_VALUES_ROWS):
        found = saver.answer(f"{base}/values", env=env_id, first=first, count=MAX_VALUES_ROWS)
        if found:
            yield found
    for path, schema_field in buffer.schema.drawn.fields.items():
        if path in images:
            for first in range(begin, stop, FRAMES):
                if saver.nbytes > MAX_NBYTES:
                    return
                found = saver.answer(
                    f"{base}/frames", field=path, env=env_id, first=first, count=FRAMES, side=SIDE
                )
                if found:
                    yield found
            continue
        if (end - begin) * schema_field.nbytes > MAX_CURVE_NBYTES:
            continue
        size = int(np.prod(numbers_of(schema_field).shape, dtype=np.int64))
        for low in range(0, min(size, MAX_COMPONENTS), COMPONENTS):
            found = saver.answer(
                f"{base}/curve",
                field=path,
                env=env_id,
                first=begin,
                stop=end,
                buckets=BUCKETS,
                c0=low,
                c1=low + COMPONENTS,
            )
            if found:
                yield found

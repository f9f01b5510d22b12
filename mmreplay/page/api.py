"""Answers the page's requests: parameters in, bytes out, without a server.

Each answer has an entity tag, made of the version of the buffer, the query and the
progress of the background thread. A browser that sends the tag back gets a short
answer without a body (304) while nothing has changed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import RemovedError, ReplayError, StaleError
from mmreplay.page import faults
from mmreplay.page.checks import LEVELS
from mmreplay.page.compare import compare_buffers
from mmreplay.page.curves import (
    MAX_BUCKETS,
    MAX_COMPONENTS,
    MAX_VALUES_ROWS,
    nothing_there,
    read_curve,
    read_values,
)
from mmreplay.page.draws import draw_steps
from mmreplay.page.episodes import (
    KIND_RUNNING,
    KINDS,
    LISTED_REWARDS,
    MAX_LISTED_REWARDS,
    UNFINISHED,
    EpisodeList,
    answer_episodes,
    find_reward,
    read_episode,
)
from mmreplay.page.frames import (
    MAX_FRAMES,
    MAX_SIDE,
    MAX_STACK,
    ImageLayout,
    alive_rows,
    layouts,
    needs_colours,
    read_frames,
)
from mmreplay.page.overview import make_overview, make_priorities
from mmreplay.page.priorities import DEFAULT_ALPHA, MAX_ALPHA, written_at
from mmreplay.page.requests import (
    BAD,
    MAX_POSITION,
    NOT_FOUND,
    NOT_IN_RING,
    UNREADABLE,
    Query,
    Refusal,
)
from mmreplay.page.rows import MAX_TRIES
from mmreplay.page.sample import component_name, rows_of, sample_blocks, take_sample
from mmreplay.page.shown import BackgroundReader, ShownBuffer, last_commit, rows_version, stamp_of
from mmreplay.page.varying import name_of, numbers_of
from mmreplay.page.wire import BINARY_TYPE, JSON_TYPE, encode_json, pack
from mmreplay.stats import Moments, moments_of

logger = logging.getLogger(__name__)

STATE_PATH = "/api/buffers"
NOT_MODIFIED, OK, FAILED = 304, 200, 500
ON_CHANGE = "private, no-cache"
FOR_AN_HOUR = "private, max-age=3600, immutable"
"""Of rows that never change: their address contains the version of the rows."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """What a request gets.

    Attributes:
        status: The HTTP status.
        body: Its bytes.
        media_type: Of the body.
        headers: By lower-case name.
    """

    status: int
    body: bytes
    media_type: str = JSON_TYPE
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Shown:
    """One buffer of the page with its episodes."""

    buffer: ShownBuffer
    episodes: EpisodeList


class Page:
    """The buffers of one page, and the answers about them.

    Attributes:
        shown: The buffers, in the order of the command line.
        sampler: Text of the sampler whose draws are shown at first; or ``""``.
    """

    def __init__(
        self, paths: Sequence[Path], images: Mapping[str, str] | None = None, sampler: str = ""
    ) -> None:
        """Show some buffers.

        Args:
            paths: Their folders.
            images: Stated layout by the path of an image field.
            sampler: What draws; see `draws.parse_sampler`.
        """
        self.background = BackgroundReader()
        self.sampler = sampler
        self.shown = []
        for path in paths:
            buffer = ShownBuffer(path, images)
            self.shown.append(Shown(buffer, EpisodeList(buffer, self.background)))
        names = [shown.buffer.name for shown in self.shown]
        for shown in self.shown:
            if names.count(shown.buffer.name) > 1:
                shown.buffer.name = str(shown.buffer.path)

    def close(self) -> None:
        """Close all buffers."""
        self.background.close()
        for shown in self.shown:
            shown.buffer.close()

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each buffer, as JSON values."""
        states = []
        for number, shown in enumerate(self.shown):
            try:
                state = _state_of(shown.buffer)
            except Exception as error:  # one buffer must not hide the others
                logger.exception("no state of %s", shown.buffer.path)
                state = _unreadable(str(error))
            states.append({"id": number, "name": shown.buffer.name, **state})
        return states

    def answer(self, path: str, query: str, tag: str = "") -> PageAnswer:
        """Answer a request.

        Args:
            path: Such as ``"/api/b/0/overview"``.
            query: Text after the question mark.
            tag: Entity tag of the answer that the browser has.
        """
        with faults.Watch() as watch:
            answer = self._answer_or_refuse(path, query, tag)
        return _refused(UNREADABLE, faults.TEXT) if watch.faulted else answer

    def _answer_or_refuse(self, path: str, query: str, tag: str) -> PageAnswer:
        try:
            return self._answer(path, Query.parse(query), query, tag)
        except Refusal as refusal:
            removed = isinstance(refusal.__cause__, RemovedError)
            return _refused(refusal.status, refusal.text, removed)
        except StaleError as error:
            return _refused(NOT_IN_RING, str(error))
        except MemoryError:
            return _refused(FAILED, "The server has not enough memory for this.")
        except (ReplayError, OSError, ValueError, ArithmeticError) as error:
            # Files of any content may be behind it: the page shows what is wrong.
            removed = isinstance(error, RemovedError)
            return _refused(UNREADABLE, str(error) or type(error).__name__, removed)
        except Exception as error:  # a fault of ours: the page says so, and lives on
            logger.exception("no answer to %s?%s", path, query)
            return _refused(FAILED, f"The server failed: {type(error).__name__}.")

    def _answer(self, path: str, query: Query, text: str, tag: str) -> PageAnswer:
        if path == STATE_PATH:
            state = {"buffers": self.states(), "sampler": self.sampler}
            return PageAnswer(OK, encode_json(state), headers={"cache-control": "no-store"})
        parts = path.split("/")
        if len(parts) != 5 or parts[:3] != ["", "api", "b"] or parts[4] not in ROUTES:
            raise Refusal(NOT_FOUND, "There is no such address.")
        shown = self._shown(parts[3])
        digest = hashlib.blake2s(f"{parts[4]}?{text}".encode(), digest_size=8)

        def tag_of(version: str, progress: float | None = None) -> str:
            more = "" if progress is None else f".{progress:.6f}"
            return f'"{version}.{digest.hexdigest()}{more}"'

        request = PageRequest(self, shown, query, tag_of, tag)
        return ROUTES[parts[4]](request)

    def _shown(self, number: str) -> Shown:
        if not (number.isascii() and number.isdigit() and len(number) <= 4):
            raise Refusal(NOT_FOUND, "There is no such buffer.")
        if int(number) >= len(self.shown):
            raise Refusal(NOT_FOUND, f"There is no buffer {number} on this page.")
        return self.shown[int(number)]

    def shown_of(self, query: Query, name: str) -> Shown:
        """Return the buffer that a parameter names by its number."""
        return self.shown[query.integer(name, 0, len(self.shown) - 1)]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """One request about one buffer.

    Attributes:
        page: The page.
        shown: The buffer.
        query: Its parameters.
        tag_of: Makes the entity tag of a version and a progress.
        tag: Entity tag that the browser has.
    """

    page: Page
    shown: Shown
    query: Query
    tag_of: Callable[..., str]
    tag: str

    @property
    def buffer(self) -> ReplayBuffer:
        """The open buffer."""
        return self.shown.buffer.buffer()

    def writer(self) -> str:
        """Return how the writer is, or ``""`` of what cannot be read."""
        try:
            return self.shown.buffer.writer(self.buffer)
        except Refusal:
            return ""

    def env_id(self) -> int:
        """Return the environment that the request names."""
        return self.query.integer("env", 0, self.buffer.num_envs - 1)

    def path(self) -> str:
        """Return the field that the request names.

        Raises:
            Refusal: There is none of that name.
        """
        path = self.query.text("field")
        if path not in self.buffer.schema.drawn.fields:
            raise Refusal(NOT_FOUND, "There is no such field.")
        return path

    def json(self, value: object, version: str, progress: float | None = None) -> PageAnswer:
        """Return JSON with an entity tag, or that it is not modified."""
        tag = self.tag_of(version, progress)
        headers = {"etag": tag, "cache-control": ON_CHANGE}
        if tag == self.tag:
            return PageAnswer(NOT_MODIFIED, b"", headers=headers)
        return PageAnswer(OK, encode_json(value), headers=headers)

    def known(self, version: str) -> PageAnswer | None:
        """Return that the browser's answer is of this version, if it is."""
        tag = self.tag_of(version)
        if tag != self.tag:
            return None
        headers = {"etag": tag, "cache-control": ON_CHANGE}
        return PageAnswer(NOT_MODIFIED, b"", headers=headers)


def answer_overview(request: PageRequest) -> PageAnswer:
    """Return the first screen."""
    alpha = request.query.number("alpha", 0, MAX_ALPHA, DEFAULT_ALPHA)
    shown = request.shown
    overview = shown.buffer.result(
        "overview", lambda buffer: make_overview(shown.buffer, shown.episodes, buffer)
    )
    value = {**overview.value, "priorities": None}
    stamp = ""
    try:
        buffer = request.buffer
        commit = last_commit(buffer)
        if commit is not None:
            # Rows are committed, and the buffer closed, after the last one was added.
            value["storage"] = {**value["storage"], "commit": commit}
            stamp = stamp_of(commit)
        value["storage"] = {**value["storage"], "opening": shown.buffer.opening(buffer)}
        stamp += f".{request.writer()}"
        written = written_at(buffer)
    except Refusal:
        written = 0  # The buffer was removed, and its last overview is shown.
    if written:
        # Priorities change while the buffer does not.
        priorities = shown.buffer.result(
            ("priorities", alpha, written), lambda buffer: make_priorities(buffer, alpha)
        )
        value["priorities"], found = priorities.value
        if found:
            value["checks"] = sorted(
                [*value["checks"], *found], key=lambda check: LEVELS.index(check["level"])
            )
            stamp += f".{priorities.made:.3f}"
    return request.json(value, overview.version + stamp)


def answer_episode_table(request: PageRequest) -> PageAnswer:
    """Return a page of the table of episodes."""
    # One look at the episodes: an answer must not have the tag of newer ones.
    columns = request.shown.episodes.with_returns()
    writer = request.writer()
    value = answer_episodes(request.shown.episodes, columns, request.query, writer == "live")
    return request.json(value, f"{columns.version}.{writer}", value["done"])


def answer_episode(request: PageRequest) -> PageAnswer:
    """Return one episode, by any of its positions."""
    env_id = request.env_id()
    position = request.query.integer("at", 0, MAX_POSITION)
    listed = request.query.integer("listed", 0, MAX_LISTED_REWARDS, LISTED_REWARDS)
    writer = request.writer()
    version = f"{request.shown.buffer.version()}.{writer}"
    known = request.known(version)
    if known is not None:
        return known
    value = read_episode(request.buffer, env_id, position, listed)
    if value["kind"] == KINDS[KIND_RUNNING] and writer != "live":
        value["kind"] = UNFINISHED
    return request.json(value, version)


def answer_reward(request: PageRequest) -> PageAnswer:
    """Return where the next reward other than 0 is."""
    query, env_id = request.query, request.env_id()
    first = query.integer("first", 0, MAX_POSITION)
    stop = query.integer("stop", 0, MAX_POSITION)
    version = request.shown.buffer.version()
    return request.known(version) or request.json(
        find_reward(request.buffer, env_id, first, stop, query.flag("back")), version
    )


def answer_curve(request: PageRequest) -> PageAnswer:
    """Return curves of a field."""
    query, path = request.query, request.path()
    env_id = request.env_id()
    first = query.integer("first", 0, MAX_POSITION)
    stop = query.integer("stop", 1, MAX_POSITION)
    buckets = query.integer("buckets", 1, MAX_BUCKETS, 1024)
    low = query.integer("c0", 0, 1 << 40, 0)
    high = query.integer("c1", 1, 1 << 40, low + 1)
    if not low < high <= low + MAX_COMPONENTS:
        raise Refusal(BAD, f"c1 must be 1 to {MAX_COMPONENTS} above c0, got {high - low}.")
    version = request.shown.buffer.version()
    known = request.known(version)
    if known is not None:
        return known
    stored = request.buffer.schema.drawn[path]
    field_ = numbers_of(stored)
    if low >= max(1, math.prod(field_.shape)):
        raise Refusal(
            BAD,
            f"c0 must be below {math.prod(field_.shape):,}, the components of {path}, got {low:,}.",
        )
    curve = read_curve(request.buffer, path, env_id, first, stop, buckets, (low, high))
    count = len(curve.mean)
    head = {
        "first": curve.first,
        "stop": curve.stop,
        "buckets": curve.mean.shape[1],
        "components": count,
        "all": curve.components,
        "nonfinite": curve.num_nonfinite,
        "integer": field_.rules.integers(field_),
        "names": [
            component_name(name_of(path, stored), low + number, field_.shape)
            for number in range(count)
        ],
    }
    if curve.offsets:
        # As text: a number of JavaScript has 53 bits.
        head["offsets"] = [repr(offset) for offset in curve.offsets]
    body = pack(head, curve.lowest, curve.highest, curve.mean)
    headers = {"etag": request.tag_of(version), "cache-control": ON_CHANGE}
    return PageAnswer(OK, body, BINARY_TYPE, headers)


def answer_frames(request: PageRequest) -> PageAnswer:
    """Return frames of an image field."""
    query, path, buffer = request.query, request.path(), request.buffer
    layout = layouts(buffer, request.shown.buffer.images).get(path)
    if not buffer.schema.drawn[path].rules.computes:
        raise Refusal(
            BAD,
            f"{path} cannot be shown as an image, as its length varies. Read its "
            "values with values.",
        )
    if layout is None:
        raise Refusal(BAD, f"{path} is not shown as an image. State its axes: --image {path}=HWC.")
    side = query.integer("side", 8, MAX_SIDE, MAX_SIDE)
    number = query.integer("frame", 0, MAX_STACK - 1, layout.stack - 1)
    if number >= layout.stack:
        raise Refusal(
            BAD, f"frame must be below {layout.stack}, the stacked frames of {path}, got {number}."
        )
    if "at" in query:
        rows = query.rows("at", MAX_FRAMES)
    else:
        env_id = request.env_id()
        first = query.integer("first", 0, MAX_POSITION)
        count = query.integer("count", 1, MAX_FRAMES, 1)
        rows = [(env_id, first + step) for step in range(count)]
    field_ = buffer.schema.drawn[path]
    limits = None
    if field_.dtype not in ("uint8", "bool"):
        limits = frame_limits(request.shown.buffer, path, layout)
    margin = np.zeros(buffer.num_envs, np.int64)
    for _ in range(MAX_TRIES):
        oldest = buffer.span.first
        env_ids, positions = alive_rows(buffer, rows, margin)
        if not len(positions):
            raise nothing_there(buffer.span, *rows[0])
        try:
            pixels = read_frames(
                buffer, path, layout, env_ids, positions, side=side, number=number, limits=limits
            )
            break
        except StaleError:
            # Some were overwritten since they were looked up: others are left.
            margin = 2 * (margin + buffer.span.first - oldest)
    else:
        raise nothing_there(buffer.span, *rows[0])
    count = len(pixels)
    head: dict[str, Any] = {
        "shape": list(pixels.shape),
        "at": np.stack([env_ids[:count], positions[:count]], axis=1),
        "layout": layout.to_json(),
    }
    if limits is not None:
        head |= {"low": limits[0], "high": limits[1]}
    same = query.text("v", "") == rows_version(buffer)
    caching = FOR_AN_HOUR if same and not field_.mutable else "private, no-cache"
    if len(positions) < len(rows):
        # Rows that are not written yet may be there at the next request.
        caching = "no-store"
    return PageAnswer(OK, pack(head, pixels), BINARY_TYPE, {"cache-control": caching})


def frame_limits(shown: ShownBuffer, path: str, layout: ImageLayout) -> tuple[float, float]:
    """Return the lowest and highest finite value of a field in a sample.

    Args:
        shown: The buffer.
        path: An image field that is no uint8.
        layout: Of it; colours in ``[0, 1]`` are taken as they are.
    """

    def find(buffer: ReplayBuffer) -> tuple[float, float]:
        some = take_sample(buffer).at_most(rows_of(buffer.schema.drawn[path]))
        moments = Moments()
        for *_, values in sample_blocks(buffer, path, some):
            moments = moments.merge(moments_of(values))
        if not moments.count:
            return 0.0, 1.0
        low, high = float(moments.min), float(moments.max)
        unit = low >= 0 and high <= 1
        if unit and not needs_colours(buffer.schema.drawn[path], layout):
            return 0.0, 1.0
        return low, high

    # The first range stays: colours must mean the same in all frames.
    return shown.fixed(("limits", path, rows_version(shown.buffer())), find)


def answer_values(request: PageRequest) -> PageAnswer:
    """Return the small fields of neighbouring rows."""
    env_id = request.env_id()
    first = request.query.integer("first", 0, MAX_POSITION)
    count = request.query.integer("count", 1, MAX_VALUES_ROWS, 64)
    version = request.shown.buffer.version()
    return request.known(version) or request.json(
        read_values(request.buffer, env_id, first, count), version
    )


def answer_draws(request: PageRequest) -> PageAnswer:
    """Return the draws of a sampler."""
    default = request.page.sampler or None
    text = request.query.text("sampler", default)
    seed = request.query.integer("seed", 0, (1 << 32) - 1, 0)
    value = draw_steps(request.shown.buffer, text, seed)
    headers = {"cache-control": "no-store"}
    return PageAnswer(OK, encode_json(value), headers=headers)


def answer_compare(request: PageRequest) -> PageAnswer:
    """Return the differences from another buffer of the page."""
    other = request.page.shown_of(request.query, "c")
    pair = (request.shown, other)
    # With their returns: reading them may take several requests.
    episodes = [shown.episodes.with_returns() for shown in pair]
    done = min(columns.done for columns in episodes)
    version = f"{episodes[0].version}-{episodes[1].version}"
    tag = request.tag_of(version, done)
    headers = {"etag": tag, "cache-control": ON_CHANGE}
    if tag == request.tag:
        return PageAnswer(NOT_MODIFIED, b"", headers=headers)
    buffers = (request.buffer, other.buffer.buffer())
    value = compare_buffers(buffers, (episodes[0], episodes[1]))
    value["names"] = [shown.buffer.name for shown in pair]
    value["done"] = done
    return PageAnswer(OK, encode_json(value), headers=headers)


ROUTES: dict[str, Callable[[PageRequest], PageAnswer]] = {
    "overview": answer_overview,
    "episodes": answer_episode_table,
    "episode": answer_episode,
    "reward": answer_reward,
    "curve": answer_curve,
    "frames": answer_frames,
    "values": answer_values,
    "draws": answer_draws,
    "compare": answer_compare,
}
"""What answers ``/api/b/NUMBER/NAME``."""


def _state_of(buffer: ShownBuffer) -> dict[str, Any]:
    for _ in range(2):
        with faults.Watch() as watch:
            state = buffer.state()
        if not watch.faulted:
            return state
        # Opened again, the buffer says what is wrong with it.
    return _unreadable(faults.TEXT)


def _unreadable(text: str) -> dict[str, Any]:
    return {"state": "unreadable", "text": text, "repair": ""}


def _refused(status: int, text: str, removed: bool = False) -> PageAnswer:
    headers = {"cache-control": "no-store"}
    value = {"error": text, "removed": True} if removed else {"error": text}
    return PageAnswer(status, encode_json(value), headers=headers)

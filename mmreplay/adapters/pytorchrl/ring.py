"""The base of pytorchrl's storages: transitions in a ring, slices in and out.

A step holds a row of each environment: every value is ``[num_proc, *shape]``. Rows are
numbered from the oldest, whatever the ring has overwritten.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from mmreplay.adapters.common.location import BufferLocation, StrPath
from mmreplay.adapters.common.values import LOOKS, check_counts, seed_of_draws
from mmreplay.adapters.pytorchrl.data import Columns, Maker, Slice, uninterrupted_ranges
from mmreplay.adapters.pytorchrl.rows import RowStorage
from mmreplay.buffer.replay_buffer import ReplayBuffer as Ring
from mmreplay.errors import SchemaError, undone_by
from mmreplay.samplers.base import Sampler


class RingStorage(RowStorage):
    """A storage whose rows lie in one ring; subclasses say how batches are made.

    Attributes:
        size: Rows stored, each with a step of every environment.
        step: Rows inserted since the last reset, modulo `max_size`.
    """

    _fixed: ClassVar[dict[str, str]] = {"home": "Make another storage, with a path."}
    """Attributes that do not change once the storage is made, and what to do."""

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage; its ring is made when the first transition comes.

        Args:
            size: Rows kept.
            device: Where batches go.
            actor: The actor.
            algorithm: The algorithm.
            envs: The environments.
            path: The ring's folder; see `BufferLocation`.
            resume: Continue the existing ring.

        Raises:
            FormatError: A ring exists, and resume is False.
            SchemaError: The size is not positive, or less than that of the existing
                ring.
        """
        self._check("size", size)
        self.actor, self.algo, self.device, self.envs = actor, algorithm, device, envs
        self.home = BufferLocation("pytorchrl", path, resume)
        self._max_size = int(size)
        self._ring: Ring | None = None
        self._empty: dict[str, Any] = {}
        self._mark = 0
        # The newest position that no row before it leads to.
        self._cut_at = 0
        self._nested = True
        # Rows of a reset stay until something else is done: the learner of the same
        # process takes them out and puts the very same ones in again.
        self._forgotten: tuple[int, int] | None = None
        self._slices: WeakValueDictionary[int, Slice] = WeakValueDictionary()
        self._seed = seed_of_draws()
        if self.home.resumed:
            self._check_size(size)
            self._ring = self.home.reopen(self._sampler(), self._transforms())
            self._go_on()

    def _check_size(self, size: int) -> None:
        """Refuse to give up rows that are there, which a wrong number would do."""
        with Ring.open(self.home.path) as found:
            capacity = found.capacity
        if self._max_size < capacity:
            raise SchemaError(
                f"size must be at least the {capacity} rows of {self.home.path}, got "
                f"{size}, which is {self._max_size} rows. Pass its size, then shrink "
                "it by update_storage_parameter('max_size', n)."
            )

    def _go_on(self) -> None:
        """Take over a ring that was there; a smaller one grows."""
        assert self._ring is not None
        if self._ring.capacity < self._max_size:
            self._ring.resize(self._max_size)
        self._max_size = self._ring.capacity
        self._mark = self._cut_at = int(self._ring.heads[0])
        self._recall()

    @classmethod
    def _check(cls, name: str, value: object) -> None:
        """Refuse a value of an argument or attribute, by name.

        Raises:
            SchemaError: It is out of range.
        """
        if name in ("size", "max_size"):
            check_counts(1, **{name: value})

    @classmethod
    def create_factory(
        cls,
        size: int,
        *options: Any,
        path: StrPath | None = None,
        resume: bool = False,
        **named: Any,
    ) -> Maker:
        """Return a maker of storages from (device, actor, algorithm, envs); it pickles.

        Raises:
            SchemaError: An option is out of range.
        """
        call = inspect.signature(cls)
        made = call.bind(size, None, None, None, None, *options, **named)
        for name, value in made.arguments.items():
            cls._check(name, value)
        return Maker(cls, size, options, {"path": path, "resume": resume, **named})

    @property
    def max_size(self) -> int:
        """Rows kept."""
        return self._max_size

    @property
    def size(self) -> int:  # noqa: D102 - an attribute of the class
        first, stop = self._alive()
        return stop - first

    @property
    def step(self) -> int:  # noqa: D102 - an attribute of the class
        if self._ring is None or self._forgotten is not None:
            return 0
        return (int(self._ring.heads[0]) - self._mark) % self.max_size

    @property
    def data(self) -> Mapping[str, Any]:
        """All rows by key, oldest first, read when they are looked at."""
        return self._sliced(*self._alive())

    def _alive(self) -> tuple[int, int]:
        """Positions of the rows that are there."""
        if self._ring is None:
            return 0, 0
        span = self._ring.span
        stop = int(span.stop[0]) if self._forgotten is None else self._forgotten[0]
        return int(span.first[0]), stop

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """Insert one step of every environment, all or nothing.

        Args:
            sample: ``[num_proc, *shape]`` by key, or dicts of them. Keys that are no
                `storage_tensors` are let go.

        Raises:
            SchemaError: A key of the first transition is missing, or a shape differs.
        """
        self._settle()
        ring = self._ring
        if ring is not None and not self._slices:
            for look in LOOKS:
                plain = self._plain(sample, look)
                if plain is not None and ring.try_add(plain) is not None:
                    return
        columns = self._columns(sample)
        if self._ring is None:
            self._make({path: value[None] for path, value in columns.items()})
        assert self._ring is not None
        self._keep(1)
        self._ring.add(self._known(self._narrowed(columns)))

    def insert_data_slice(self, new_data: Mapping[str, Any]) -> None:
        """Insert many steps; of more than `max_size` the last ones stay.

        One's own rows of before a `reset` go on where they were. Any others are a
        stretch of their own: they may be another collector's.

        Args:
            new_data: ``[T, num_proc, *shape]`` by key, or dicts of them; None where
                there is nothing.

        Raises:
            SchemaError: Lengths differ, or as `insert_transition`; nothing is in.
        """
        if isinstance(new_data, Slice) and new_data.storage is self:
            if self._owns(new_data.range):
                self._slices.pop(id(new_data), None)
                self._forgotten = None
                return
            new_data = new_data.loaded()
        self._settle()
        columns = self._columns(new_data, lead=1)
        lengths = {path: len(array) for path, array in columns.items()}
        if len(set(lengths.values())) != 1:
            raise SchemaError(
                f"slice: all keys must have the same number of steps, got lengths {lengths}."
            )
        if 0 not in lengths.values():
            self._interrupt()
            self._append(columns)
            self._interrupt()

    def _interrupt(self) -> None:
        """Mark a break: the next row does not follow the last one."""
        if self._ring is not None:
            self._ring.end_episodes()
            self._cut_at = int(self._ring.heads[0])

    def _append(self, columns: Columns) -> None:
        """Insert steps that follow those that are there, ``[T, num_proc, *shape]``."""
        if self._ring is None:
            self._make(columns)
        assert self._ring is not None
        self._keep(len(next(iter(columns.values()))))
        self._ring.extend(self._known(self._narrowed(columns)))

    def _owns(self, rows: tuple[int, int]) -> bool:
        """Return whether these are the rows that were forgotten."""
        return rows == self._forgotten

    def _keep(self, coming: int) -> None:
        """Read what was taken out and not looked at before it is overwritten."""
        for each in list(self._slices.values()):
            assert self._ring is not None
            if each.range[0] + self.max_size < int(self._ring.heads[0]) + coming:
                each.loaded()

    def get_data_slice(self, start_pos: int, end_pos: int) -> dict[str, Any]:
        """Copy rows, numbered from the oldest; as Python's slices, it cuts what is not.

        Returns:
            float32 ``[T, num_proc, *shape]`` by key, or dicts of them; None for keys
            that were never inserted, which `data` lacks.
        """
        self._settle()
        first, stop = self._alive()
        begin, end, _ = slice(start_pos, end_pos).indices(stop - first)
        rows = first + begin, first + max(begin, end)
        return self.read(*rows) | self._next_to(*rows)

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> Mapping[str, Any]:
        """All rows inserted since the last reset that are still there.

        They are read when they are looked at, so that `reset` and `insert_data_slice`
        of them, as one process does with its own, move nothing.
        """
        first, stop = self._alive()
        since = stop if self._forgotten is not None else self._mark
        return self._sliced(max(first, since), stop)

    def _sliced(self, first: int, stop: int) -> Slice:
        found = Slice(self, first, stop)
        self._slices[id(found)] = found
        return found

    def reset(self) -> None:
        """Forget the rows inserted since the last reset."""
        first, stop = self._alive()
        if self._forgotten is None and stop > max(first, self._mark):
            self._forgotten = (max(first, self._mark), stop)

    def _settle(self) -> None:
        """Take out what was forgotten, and keep what is older."""
        if self._forgotten is None:
            return
        assert self._ring is not None
        self._keep(self.max_size)
        first, stop = self._alive()
        self._forgotten = None
        shift = int(self._ring.heads[0]) - first
        if stop > first:
            self._copying(first, stop, shift)
            self._copy_forward(first, stop)
        else:
            self._ring.clear()
        self._mark = self._cut_at = int(self._ring.heads[0])
        self._moved(shift)

    def _copying(self, first: int, stop: int, shift: int) -> None:
        """Rows ``[first, stop)`` are about to be written again, `shift` rows later."""

    def _moved(self, shift: int) -> None:
        """Rows that are kept were copied forward by so many positions."""

    def _copy_forward(self, first: int, stop: int) -> None:
        """Write older rows again behind the newest, and give up all before them.

        Published rows are never unwritten. Rows are read before their place comes to
        be overwritten, as both go on at one pace.
        """
        assert self._ring is not None
        self._ring.end_episodes()
        for begin, end, apart in uninterrupted_ranges(self._ring, first, stop):
            columns = self._columns(self.read(begin, end))
            columns |= self._retained_columns(begin, end)
            if apart:
                self._ring.end_episodes()
            self._ring.extend(self._known(self._narrowed(columns)))
        self._ring.end_episodes()
        kept = stop - first
        gone = int(self._ring.span.lengths[0]) - kept
        if gone:
            self._ring.dequeue(gone)

    def _retained_columns(self, first: int, stop: int) -> Columns:
        """Return what is copied with rows beside pytorchrl's keys."""
        return {}

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change an attribute, if there is one of that name.

        A new `max_size` resizes the ring, and keeps the newest rows. Other parameters
        hold for new rows; stored rows keep the old value.

        Raises:
            SchemaError: The value is out of range, or the attribute cannot change.
        """
        self._check(parameter_name, new_parameter_value)
        if parameter_name == "max_size":
            self._settle()
            if self._ring is not None:
                # What was taken out may be among what goes.
                self._keep(self.max_size)
                self._ring.resize(int(new_parameter_value))
            self._max_size = int(new_parameter_value)
            return
        if not hasattr(self, parameter_name):
            return
        made = getattr(type(self), parameter_name, None)
        settable = isinstance(made, property) and made.fset is not None
        own = parameter_name in vars(self) and parameter_name not in self._fixed
        if not settable and (not own or parameter_name.startswith("_")):
            way_out = self._fixed.get(
                parameter_name, "It follows from the rows, or from how the storage was made."
            )
            raise SchemaError(
                f"{parameter_name} cannot change, got the new value "
                f"{new_parameter_value!r:.80}. {way_out}"
            )
        setattr(self, parameter_name, new_parameter_value)

    def __getstate__(self) -> dict[str, Any]:
        """See `PickledByPath`."""
        self._settle()
        state = super().__getstate__()
        del state["_slices"]
        sampler = state.pop("sampler")
        drawn = None if sampler is None else sampler.state_dict()
        return state | {"sampler": None, "drawn": drawn}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A storage of its own with the same rows, in a folder of its own.

        That is another temporary one, or ``<path>-copy1`` and so on. With resume=True,
        a copy goes on with what its folder holds already, as the storage does. Actor,
        algorithm and environments are those of the storage: they may hold processes,
        which cannot be copied. A copy that fails leaves no folder.
        """
        state = self.__getstate__()
        del state["home"]
        for name in ("actor", "algo", "envs", "device", "scaler", "her_function"):
            shared = getattr(self, name, None)
            memo[id(shared)] = shared
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = copy.deepcopy(state, memo)
        home = self.home.for_copy()
        if home.resumed:
            # How far another ring's draws are says nothing here.
            state["drawn"] = None
        with undone_by(home.discard):
            if self._ring is not None and not home.resumed:
                self._ring.snapshot(home.path)
            made.__setstate__({**state, "home": home})
            if home.resumed:
                made._go_on()
        return made

    def _open_again(self, sampler: Sampler | None) -> None:
        self._slices = WeakValueDictionary()
        sampler, drawn = self._sampler(), self.__dict__.pop("drawn")
        self._ring = self.home.reopen(sampler, self._transforms())
        # A ring that is open already keeps the sampler that draws from it.
        if self._ring is not None and self._ring.sampler is sampler:
            self._cut_at = int(self._ring.heads[0])
            self._recall()
            if drawn:
                sampler.load_state_dict(drawn)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} of {self.size:,} of {self.max_size:,} rows in {self.home!r}>"

    def close(self) -> None:
        """Commit and close; a temporary folder goes."""
        self.home.close()

"""One buffer on disk and its oracle, driven alike; the machine chooses what to do."""

import shutil

import numpy as np

import mmreplay as mr
from tests.buffer.oracle import Oracle, columns
from tests.buffer.support import ranked

SCHEMA = mr.Schema(
    {
        "observation": {"pixels": mr.Field((64, 64), "uint8"), "state": mr.Field((2,), "int64")},
        "action": mr.Field((), "int32"),
        "reward": mr.Field((), "float32"),
        "note": mr.Field((), "float32", mutable=True),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def observation(numbers):
    """Pixels and state that tell one number from every other."""
    pixels = (np.arange(4096).reshape(64, 64) + np.array(numbers)[..., None, None]) % 251
    return {
        "pixels": pixels.astype(np.uint8),
        "state": np.stack([np.array(numbers), -np.array(numbers)], axis=-1),
    }


class Driven:
    """A buffer on disk under test, beside what it must hold."""

    def __init__(
        self, folder, capacity, num_envs, autoreset, layout, commit_every, engine="memmap"
    ):
        self.path = folder / "ring"
        self.commit_every = commit_every
        self.buffer = mr.ReplayBuffer.create(
            self.path,
            SCHEMA,
            capacity,
            num_envs,
            autoreset=autoreset,
            layout=layout,
            commit_every=commit_every,
            engine=engine,
        )
        self.oracle = Oracle(capacity, num_envs, autoreset)
        self.reader = mr.ReplayBuffer.open(self.path)
        self.durable = self.buffer.heads
        self.extra = {}
        self.number = 0

    @property
    def num_envs(self):
        return len(self.oracle.envs)

    def step(self, env_ids, kinds):
        """One step by environment, and its final observation."""
        steps, finals = {}, {}
        for env_id, kind in zip(env_ids, kinds, strict=True):
            self.number += 1
            finals[env_id] = -self.number
            steps[env_id] = {
                "observation": self.number,
                "action": np.int32(self.number),
                "reward": np.float32(self.number / 8),
                "note": np.float32(0),
                "terminated": "t" in kind,
                "truncated": "u" in kind,
                **{name: np.int16(self.number % 1000) for name in self.extra},
            }
        return steps, finals

    def call(self, made, env_ids, final, *, many):
        """Give the buffer steps as the user would; raises what it raises."""
        given = [columns(list(steps.values())) for steps, _ in made]
        data = {name: np.stack([g[name] for g in given]) for name in given[0]}
        last = np.array([list(finals.values()) for _, finals in made])
        if not many:
            data, last = {name: c[0] for name, c in data.items()}, last[0]
        data["observation"] = observation(data["observation"])
        options = {"final_observation": observation(last)} if final else {}
        put = self.buffer.extend if many else self.buffer.add
        put(data, env_ids=env_ids, **options)

    def accept(self, made, final):
        """Tell the oracle that a call is in."""
        finals = [f for _, f in made] if final else None
        self.oracle.extend([steps for steps, _ in made], finals)

    def committed(self):
        self.durable = self.buffer.heads

    def drop(self):
        """Lose the writer as a kill does: nothing is committed, no slot is written."""
        parts = self.buffer._files
        parts.committer.stop()
        parts.closed = True
        self.buffer._finalizer.detach()
        parts.commit.close()
        parts.store.close()
        parts.lock.release()

    def reopen(self, how):
        self.buffer = mr.ReplayBuffer.open(
            self.path, "r+", on_resume=how, commit_every=self.commit_every
        )
        self.oracle.resume(how)

    def check(self):
        """Writer and reader show what the oracle holds."""
        for buffer in (self.buffer, self.reader):
            self._check_rows(buffer)
            legal = self.oracle.legal()
            if legal:
                env_ids, positions = np.array(list(legal)).T
                self._same(buffer.take(env_ids, positions), list(legal.values()))
                assert ranked(buffer, len(legal)) == list(legal)
                batch = buffer.sample(3)
                assert (batch.probabilities == 1 / len(legal)).all()
                places = zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True)
                self._same(batch, [legal[place] for place in places])

    def _check_rows(self, buffer):
        oracle = self.oracle
        span = buffer.span
        firsts = [stream.first(oracle.capacity) for stream in oracle.envs]
        assert span.first.tolist() == firsts
        assert span.stop.tolist() == [len(stream.rows) for stream in oracle.envs]
        assert len(buffer) == len(oracle.steps())
        rows = buffer.gather_all()
        alive = oracle.alive()
        assert list(zip(rows.env_ids, rows.positions, strict=True)) == alive
        if alive:
            self._same(rows, [oracle.row(*place) for place in alive])
            finals = [oracle.envs[e].rows[p].final for e, p in alive]
            assert rows["final"].tolist() == finals

    def _same(self, batch, values, but=()):
        expected = columns(values)
        for name in ("observation", "next_observation"):
            if name in expected:
                for leaf, column in observation(expected.pop(name)).items():
                    expected[f"{name}/{leaf}"] = column
        assert set(batch) - {"final"} == set(expected)
        for name, column in expected.items():
            if name not in but:
                np.testing.assert_array_equal(batch[name], column, err_msg=name)

    def check_copy(self, folder):
        """A copied folder holds every committed row alive, and no other value.

        It is what a power cut would leave, but for the writes not yet synced.
        """
        shutil.rmtree(folder, ignore_errors=True)
        # A copy takes its time: what seals meanwhile would be half in it.
        sealing = getattr(self.buffer._files.store, "sealing", None)
        if sealing is not None:
            sealing.seal_now([])
        shutil.copytree(self.path, folder)
        with mr.ReplayBuffer.open(folder) as copy:
            span = copy.span
            rows = copy.gather_all()
            places = list(zip(rows.env_ids, rows.positions, strict=True))
        for env_id, stream in enumerate(self.oracle.envs):
            assert self.durable[env_id] <= span.stop[env_id] <= len(stream.rows)
            first = max(stream.first(self.oracle.capacity), span.first[env_id])
            promised = range(stream.first(self.oracle.capacity), self.durable[env_id])
            assert first == stream.first(self.oracle.capacity) or not promised
        if places:
            values = [self.oracle.row(*place) for place in places]
            self._same(rows, values, but=("truncated",))

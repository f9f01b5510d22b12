"""Threads of one process: adds, draws, queues and rebuilds take turns."""

import threading

import numpy as np

import mmreplay as mr

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "int64"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def step(number):
    return {
        "observation": np.array([number, number]),
        "terminated": number % 7 == 6,
        "truncated": number % 11 == 10,
    }


def together(*works):
    """Run works in threads of their own and raise what one of them raised."""
    raised = []

    def run(work):
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_draws_during_adds_leave_the_index_right(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, 300) as buffer:
        buffer.extend({k: np.array([step(i)[k] for i in range(50)]) for k in SCHEMA})

        def add():
            for number in range(50, 3000):
                buffer.add(step(number))

        def draw():
            for _ in range(600):
                batch = buffer.sample(16)
                seen = batch["observation"][:, 0]
                after = batch["next_observation"][:, 0]
                ended = batch["terminated"]
                assert (np.where(ended, seen, seen + 1) == after).all()

        together(add, draw, draw, lambda: [len(buffer) for _ in range(600)])
        steps, illegal = len(buffer), buffer.view.num_illegal
        # A fresh reader looks at every row; the one that followed must agree.
        with mr.ReplayBuffer.open(tmp_path / "b") as fresh:
            assert steps == len(fresh)
            assert fresh.view.starts.lengths.sum() > 0
            assert illegal == fresh.view.num_illegal


def test_rows_are_dequeued_once(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, 1000) as buffer:
        buffer.extend({k: np.array([step(i)[k] for i in range(800)]) for k in SCHEMA})
        taken = []

        def take():
            taken.extend(int(buffer.dequeue(1).positions[0]) for _ in range(100))

        together(take, take, take, take)
        assert sorted(taken) == list(range(400))


def test_adds_and_values_during_resizes_are_all_there(tmp_path):
    for path in (tmp_path / "b", None):
        engine = "memory" if path is None else "memmap"
        schema = SCHEMA.with_field("value", mr.Field((), "float32", mutable=True))
        with mr.ReplayBuffer.create(path, schema, 5000, engine=engine) as buffer:
            buffer.add({**step(0), "value": 0.0})

            def add(buffer=buffer):
                for number in range(1, 1500):
                    buffer.add({**step(number), "value": 0.0})

            def resize(buffer=buffer):
                for capacity in (4000, 6000, 3000):
                    buffer.resize(capacity)

            def rewrite(buffer=buffer):
                for number in range(1, 200):
                    buffer.write_field("value", 0, 0, float(number))
                    assert buffer.get_field("value", 0, 0) == number

            together(add, resize, rewrite)
            rows = buffer.gather_all()
            assert rows["observation"][:, 0].tolist() == list(range(1500))

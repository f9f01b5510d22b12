"""Datasets that Minari itself makes and opens; its reader is the oracle."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.nesting import flatten
from tests.convert.foreign.oracle import assert_same, drawn, episode, joined
from tests.convert.foreign.test_minari_export import FRAME, GRAY, filmed
from tests.convert.test_image_casts import files_of
from tests.schema.image_files import pixels_of

# Minari warns of what its datasets lack, and leaves folders to the collector.
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
minari = pytest.importorskip("minari", reason="minari is not installed")
gym = pytest.importorskip("gymnasium")

FORMATS = ["hdf5", "arrow", "parquet"]


@pytest.fixture(autouse=True)
def _datasets_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


def record(name, env_id, data_format="hdf5", episodes=4, limit=30):
    """Episodes that end both ways, and one that is cut."""
    pytest.importorskip("jax", reason="jax, which Minari records with, is missing")
    env = gym.make(env_id, max_episode_steps=limit)
    collector = minari.DataCollector(env, data_format=data_format)
    for seed in range(episodes):
        collector.reset(seed=seed)
        collector.action_space.seed(seed)
        done = False
        while not done:
            *_, terminated, truncated, _ = collector.step(collector.action_space.sample())
            done = terminated or truncated
    collector.reset(seed=9)
    collector.step(collector.action_space.sample())
    dataset = collector.create_dataset(
        dataset_id=name,
        algorithm_name="random",
        author="a",
        author_email="a@b",
        code_permalink="c",
        description="d",
        eval_env=env_id,
    )
    collector.close()
    return dataset


def oracle(dataset):
    return joined(
        [
            episode(e.observations, e.actions, e.rewards, e.terminations, e.truncations)
            for e in dataset.iterate_episodes()
        ]
    )


def make(name, observations, actions, observation_space, action_space, **options):
    """A dataset of one-step-at-a-time data, made without an environment."""
    from minari.data_collector import EpisodeBuffer

    buffers = []
    for seed, (obs, act) in enumerate(zip(observations, actions, strict=True)):
        steps = len(next(iter(flatten({"a": act}).values())))
        rng = np.random.default_rng(seed)
        ends = np.zeros(steps, bool)
        ends[-1] = True
        buffers.append(
            EpisodeBuffer(
                id=seed,
                observations=obs,
                actions=act,
                rewards=list(rng.random(steps)),
                terminations=list(ends & bool(seed % 2)),
                truncations=list(ends & (not seed % 2)),
            )
        )
    return minari.create_dataset_from_buffers(
        name,
        buffers,
        observation_space=observation_space,
        action_space=action_space,
        algorithm_name="x",
        author="a",
        author_email="a@b",
        code_permalink="c",
        description="d",
        **options,
    )


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_every_step_is_what_minari_reads(tmp_path, env_id, data_format):
    dataset = record("some/thing-v0", env_id, data_format)
    report = mr.load(tmp_path / "datasets/some/thing-v0", tmp_path / "buffer")
    assert report.rows == dataset.total_steps + dataset.total_episodes
    assert report.episodes == dataset.total_episodes
    found, left = drawn(tmp_path / "buffer", ["observation"])
    expected = oracle(dataset)
    # What is cut off has an observation behind it, and is kept as truncated.
    assert left == 0
    assert_same(found, expected)


@pytest.mark.parametrize("data_format", FORMATS)
def test_a_dataset_is_loaded_by_its_id_and_as_minari_has_it_open(tmp_path, data_format):
    dataset = record("some/thing-v0", "CartPole-v1", data_format)
    for number, source in enumerate(["some/thing-v0", dataset]):
        mr.load(source, tmp_path / f"buffer-{number}", strict=True)
        found, _ = drawn(tmp_path / f"buffer-{number}", ["observation"])
        assert_same(found, oracle(dataset))
    length = np.median([len(episode) for episode in dataset.iterate_episodes()])
    some = dataset.filter_episodes(lambda episode: len(episode) > length)
    assert 0 < some.total_episodes < dataset.total_episodes
    report = mr.load(some, tmp_path / "some", strict=True)
    assert report.rows == some.total_steps + some.total_episodes
    found, _ = drawn(tmp_path / "some", ["observation"])
    assert_same(found, oracle(some))


def nested_spaces():
    box = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    observation = gym.spaces.Dict(
        {
            "pose": box,
            "grid": gym.spaces.Box(0, 255, (5, 4), np.uint8),
            "pair": gym.spaces.Tuple([gym.spaces.Discrete(5), box]),
        }
    )
    return observation, gym.spaces.Dict({"turn": gym.spaces.Discrete(4), "go": box})


def nested_data(rng, count=3, steps=6):
    def many(n):
        return {
            "pose": rng.random((n, 3)),
            "grid": rng.integers(0, 256, (n, 5, 4), np.uint8),
            "pair": (rng.integers(0, 5, n), rng.random((n, 3))),
        }

    actions = [
        {"turn": rng.integers(0, 4, steps), "go": rng.random((steps, 3))} for _ in range(count)
    ]
    return [many(steps + 1) for _ in range(count)], actions


@pytest.mark.parametrize("data_format", FORMATS)
def test_dicts_and_tuples_come_in_and_go_out_again(tmp_path, rng, data_format):
    observations, actions = nested_data(rng)
    dataset = make("nested-v0", observations, actions, *nested_spaces(), data_format=data_format)
    mr.load(tmp_path / "datasets/nested-v0", tmp_path / "buffer")
    paths = ["pose", "grid", "pair/0", "pair/1"]
    found, _ = drawn(tmp_path / "buffer", [f"observation/{each}" for each in paths])
    assert_same(found, oracle(dataset))
    target = tmp_path / "datasets/nested-v1"
    mr.export(tmp_path / "buffer", target, format="minari")
    again = minari.load_dataset("nested-v1")
    assert again.observation_space == dataset.observation_space
    assert again.action_space == dataset.action_space
    assert_same(oracle(again), oracle(dataset))


@pytest.mark.parametrize("data_format", FORMATS)
def test_datasets_that_minari_edits_are_what_it_reads(tmp_path, rng, data_format):
    """Filtered, split, added to and combined, a thousand steps and more each time."""
    spaces = nested_spaces()
    lengths = rng.integers(1, 60, 70).tolist()
    data = [nested_data(rng, 1, n) for n in lengths]
    observations, actions = ([each[k][0] for each in data] for k in range(2))
    options = {"data_format": data_format}
    half = len(lengths) // 2
    whole = make("mine/whole-v0", observations, actions, *spaces, **options)
    first = make("mine/half-v0", observations[:half], actions[:half], *spaces, **options)
    other = make("mine/rest-v0", observations[half:], actions[half:], *spaces, **options)
    some = whole.filter_episodes(lambda episode: len(episode) % 3 > 0)
    parts = {
        "all": whole,
        "some": some,
        "filtered twice": some.filter_episodes(lambda episode: len(episode) > 9),
        "combined": minari.combine_datasets([other, first], "mine/both-v0"),
    }
    split = minari.split_dataset(whole, [half, len(lengths) - half], seed=3)
    parts |= {f"split {number}": part for number, part in enumerate(split)}
    paths = ["pose", "grid", "pair/0", "pair/1"]
    for name, dataset in parts.items():
        report = mr.load(dataset, tmp_path / name)
        assert report.rows == dataset.total_steps + dataset.total_episodes
        found, left = drawn(tmp_path / name, [f"observation/{each}" for each in paths])
        assert left == 0
        assert_same(found, oracle(dataset))
    assert sum(dataset.total_steps for dataset in parts.values()) > 5_000


def test_what_is_written_is_opened_by_minari(tmp_path):
    dataset = record("ours/cart-v0", "CartPole-v1")
    mr.load(tmp_path / "datasets/ours/cart-v0", tmp_path / "buffer")
    report = mr.export(tmp_path / "buffer", tmp_path / "datasets/ours/cart-v1", format="minari")
    assert report.notes == ()
    again = minari.load_dataset("ours/cart-v1")
    assert again.total_episodes == dataset.total_episodes
    assert again.total_steps == dataset.total_steps
    assert again.observation_space == dataset.observation_space
    assert again.recover_environment().spec.id == "CartPole-v1"
    expected = oracle(dataset)
    assert_same(oracle(again), expected)
    one, other = (list(each.storage.get_episode_metadata(range(3))) for each in (dataset, again))
    for left, right in zip(one, other, strict=True):
        assert left["total_steps"] == right["total_steps"]
    assert minari.list_local_datasets()["ours/cart-v1"]


def test_a_recorded_buffer_goes_out_with_spaces_of_its_own(tmp_path, rng):
    schema = mr.Schema(
        {
            "observation": {"a": mr.Field((3,), "float32"), "b": mr.Field((), "int64")},
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
            "extra": mr.Field((2,), "float32"),
        }
    )
    with mr.ReplayBuffer.create(
        tmp_path / "buffer", schema, 100, 2, autoreset="disabled"
    ) as buffer:
        buffer.extend(
            {
                "observation": {
                    "a": rng.random((20, 2, 3)).astype(np.float32),
                    "b": rng.integers(0, 9, (20, 2)),
                },
                "action": rng.integers(0, 4, (20, 2)),
                "reward": rng.random((20, 2)).astype(np.float32),
                "terminated": rng.random((20, 2)) < 0.1,
                "truncated": rng.random((20, 2)) < 0.1,
                "extra": rng.random((20, 2, 2)).astype(np.float32),
            }
        )
        rows = buffer.gather_all()
    mr.export(tmp_path / "buffer", tmp_path / "datasets/made-v0", format="minari")
    dataset = minari.load_dataset("made-v0")
    assert dataset.total_steps == 40
    episodes = list(dataset.iterate_episodes())
    assert all(each.terminations[-1] or each.truncations[-1] for each in episodes)
    np.testing.assert_array_equal(
        np.concatenate([each.actions for each in episodes]), rows["action"]
    )
    for each in episodes:
        assert len(each.infos["extra"]) == len(each.observations["a"]) == len(each) + 1
        assert all(action in dataset.action_space for action in each.actions)


@pytest.mark.parametrize("data_format", FORMATS)
def test_images_stored_as_jpeg_are_decoded_and_reported(tmp_path, rng, data_format):
    space = gym.spaces.Box(0, 255, (40, 36, 3), np.uint8)
    smooth = np.broadcast_to(np.arange(36, dtype=np.uint8)[:, None] * 5, (40, 36, 3))
    observations = [np.stack([smooth + k for k in range(6)]) for _ in range(3)]
    observations[1][3] = rng.integers(0, 256, (40, 36, 3))
    actions = [np.arange(5) % 2 for _ in range(3)]
    dataset = make(
        "seen-v0", observations, actions, space, gym.spaces.Discrete(2), data_format=data_format
    )
    report = mr.load(tmp_path / "datasets/seen-v0", tmp_path / "buffer")
    assert any("kept as JPEG: it is lossy" in note for note in report.notes)
    assert_same(drawn(tmp_path / "buffer", ["observation"])[0], oracle(dataset))
    plain = make(
        "raw-v0",
        observations,
        actions,
        space,
        gym.spaces.Discrete(2),
        data_format=data_format,
        jpeg_encoding=False,
    )
    report = mr.load(tmp_path / "datasets/raw-v0", tmp_path / "raw")
    assert not any("JPEG" in note for note in report.notes)
    assert_same(drawn(tmp_path / "raw", ["observation"])[0], oracle(plain))


def test_minari_opens_images_that_stay_files(tmp_path):
    ring, target = filmed(tmp_path / "ring"), tmp_path / "datasets" / "seen-v0"
    mr.export(ring, target, format="minari")
    dataset = minari.load_dataset("seen-v0")
    assert dataset.total_steps == 17
    episodes = list(dataset.iterate_episodes())
    assert [len(each) for each in episodes] == [7, 7, 3]
    for name, shape in (("top", FRAME), ("gray", GRAY[:2])):
        assert dataset.observation_space[name].shape == shape
        images = np.concatenate([each.observations[name] for each in episodes])
        # The running episode shows its newest observation twice.
        files = files_of(ring, f"observation/{name}")
        wanted = [pixels_of(file).reshape(shape) for file in [*files, files[-1]]]
        np.testing.assert_array_equal(images, wanted)
    # And a set that Minari makes of it is the same.
    split = minari.split_dataset(dataset, [2, 1], seed=0)
    assert sorted(len(each) for part in split for each in part.iterate_episodes()) == [3, 7, 7]


@pytest.mark.parametrize("data_format", FORMATS)
def test_texts_are_those_that_minari_reads(tmp_path, data_format):
    spaces = gym.spaces
    texts = ["", "go", "größer", "日本語", "x" * 9, "=1+1"]
    charset = "".join(texts)
    spoken = spaces.Dict(
        {"mission": spaces.Text(9, min_length=0, charset=charset), "x": spaces.Box(-9, 9, (2,))}
    )
    action = spaces.Text(9, min_length=0, charset=charset)
    lengths = (3, 5, 1)
    observations = [
        {
            "mission": [texts[(n + i) % 6] for i in range(steps + 1)],
            "x": np.full((steps + 1, 2), n, np.float32),
        }
        for n, steps in enumerate(lengths)
    ]
    actions = [[texts[i % 6] for i in range(steps)] for steps in lengths]
    dataset = make(
        "spoken/texts-v0", observations, actions, spoken, action, data_format=data_format
    )
    mr.load("spoken/texts-v0", tmp_path / "buffer")
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.schema["action"] == mr.Field.text(36)
        rows = buffer.gather_all()
        final = (buffer.view.flags(rows.env_ids, rows.positions) & 8) != 0
    read = list(dataset.iterate_episodes())
    missions = [text for each in read for text in each.observations["mission"]]
    assert rows["observation/mission"].text() == missions
    spoken_ = [text for each in read for text in each.actions]
    assert rows["action"][~final].text() == spoken_

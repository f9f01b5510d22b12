"""Lightning's trainer gets the batches that our loaders give, and resumes."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import mmreplay as mr
from tests.contracts.sampler import steps_of
from tests.loader.support import SIZE, draws_of, fill, loader_of

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
lightning = pytest.importorskip("lightning", reason="lightning is not installed")
data = pytest.importorskip("lightning.fabric.utilities.data")
EPOCHS = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("lightning") / "b"
    fill(path, count=700, capacity=700)
    return path


@pytest.fixture(autouse=True)
def _quiet(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.ERROR, "lightning")


class Model(lightning.LightningModule):
    """Remembers its batches."""

    def __init__(self):
        super().__init__()
        self.weights, self.seen = torch.nn.Linear(3, 1), []

    def training_step(self, batch, number):
        assert type(batch) is mr.Batch
        self.seen.append(batch)
        loss = self.weights(batch["action"]).mean()
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class Progress(lightning.Callback):
    """What docs/loader.md shows: the batches of an epoch so far, in each checkpoint."""

    def __init__(self, draws):
        self.draws, self.num_batches = draws, 0

    def on_train_epoch_start(self, trainer, module):
        self.num_batches = 0

    def on_train_batch_end(self, *_):
        self.num_batches += 1

    def state_dict(self):
        return self.draws.state_after(self.num_batches)

    def load_state_dict(self, state):
        self.draws.load_state_dict(state)


class Saves(lightning.Callback):
    """Saves once, after some batches of an epoch."""

    def __init__(self, path, epoch, number):
        self.path, self.at = path, (epoch, number)

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if (trainer.current_epoch, number + 1) == self.at:
            trainer.save_checkpoint(self.path)


def trained(loader, callbacks=(), checkpoint=None, **options):
    model = Model()
    options = {"max_epochs": EPOCHS, "use_distributed_sampler": False} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    return model.seen


def replay_loader(path, sampler=None):
    sampler = sampler or mr.ShuffledSampler(seed=0)
    return mr.ReplayLoader(mr.ReplayBuffer.open(path, sampler=sampler), SIZE)


def stream_loader(path, workers=0):
    stream = mr.ReplayStream(path, mr.ShuffledSampler(seed=0), SIZE)
    return stream, DataLoader(stream, batch_size=None, num_workers=workers)


def epochs(loader, count=EPOCHS):
    return [batch for _ in range(count) for batch in loader]


def assert_same_batches(batches, expected):
    items = 0
    for one, other in zip(batches, expected, strict=True):
        assert steps_of(one) == steps_of(other)
        assert set(one) == set(other)
        for name in one:
            assert torch.equal(one[name], other[name])
        items += len(one)
    assert items >= 1000


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_gets_each_epoch_of_draws_and_of_a_stream(path, workers):
    batches = trained(loader_of(*draws_of(path), workers))
    assert_same_batches(batches, epochs(loader_of(*draws_of(path))))
    batches = trained(stream_loader(path, workers)[1])
    assert_same_batches(batches, epochs(stream_loader(path)[1]))


def test_a_fit_gets_each_epoch_of_a_replay_loader(path):
    """Lightning asks for as many batches as there are, and not for the end."""
    with replay_loader(path) as loader:
        expected = epochs(loader, 6)
    with replay_loader(path) as loader:
        assert_same_batches(trained(loader, max_epochs=6), expected)


@pytest.mark.parametrize("at", [(0, 5), (1, 3)])
def test_a_replay_loader_goes_on_after_a_checkpoint(path, tmp_path, at):
    """Lightning saves its state, and loads it, by itself."""
    with replay_loader(path) as loader:
        expected = trained(loader, [Saves(tmp_path / "c", *at)])
    with replay_loader(path) as loader:
        batches = trained(loader, checkpoint=tmp_path / "c")
    assert 0 < len(batches) < len(expected)
    done = expected[: len(expected) - len(batches)]
    assert len(done) == at[0] * len(expected) // EPOCHS + at[1]
    assert_same_batches(done + batches, expected)


def test_draws_without_end_go_on_where_lightning_has_their_number(path, tmp_path):
    def loader():
        return replay_loader(path, mr.UniformSampler(seed=0))

    number = {"limit_train_batches": 10}
    with loader() as one:
        expected = trained(one, [Saves(tmp_path / "c", 0, 5)], **number)
    with loader() as one:
        batches = trained(one, checkpoint=tmp_path / "c", **number)
    assert_same_batches(expected[:5] + batches, expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [(0, 5), (1, 3)])
def test_draws_go_on_after_a_checkpoint(path, tmp_path, at, workers):
    dataset, draws = draws_of(path)
    saves = [Progress(draws), Saves(tmp_path / "c", *at)]
    expected = trained(loader_of(dataset, draws, workers), saves)
    dataset, draws = draws_of(path, seed=9)
    batches = trained(loader_of(dataset, draws, workers), [Progress(draws)], tmp_path / "c")
    done = at[0] * len(expected) // EPOCHS + at[1]
    assert_same_batches(expected[:done] + batches, expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [(0, 5), (1, 3)])
def test_a_stream_goes_on_after_a_checkpoint(path, tmp_path, at, workers):
    stream, loader = stream_loader(path, workers)
    expected = trained(loader, [Progress(stream), Saves(tmp_path / "c", *at)])
    stream, loader = stream_loader(path, workers)
    batches = trained(loader, [Progress(stream)], tmp_path / "c")
    done = at[0] * len(expected) // EPOCHS + at[1]
    assert_same_batches(expected[:done] + batches, expected)


def test_samplers_of_lightning_replace_draws_in_one_form_only(path):
    """So that docs/loader.md passes draws as the batch sampler."""
    dataset, draws = draws_of(path)
    theirs = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, sampler=draws, batch_size=None)
    assert type(next(iter(loader))) is mr.Batch
    replaced = data._update_dataloader(loader, theirs)
    assert type(next(iter(replaced))) is dict
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):
        data._update_dataloader(loader_of(dataset, draws), theirs)

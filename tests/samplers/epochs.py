"""Epochs of samplers, batch by batch."""

from tests.contracts.sampler import steps_of


def epoch(sampler, view, batch_size):
    """The batches of what is left of an epoch."""
    number, found = sampler.epoch, []
    while sampler.epoch == number and sampler.more(view, batch_size):
        found.append(steps_of(sampler.draw(view, batch_size)))
    return found


def flat(batches):
    return [place for batch in batches for place in batch]

"""`check_sampler` passes a sampler of others and refuses broken ones with a reason."""

import random
from dataclasses import replace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.samplers.base import SHARES, STEPS, Draw, Sampler, Traits
from mmreplay.samplers.joint import JointWeights
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, stored_integer
from mmreplay.testing import SAMPLER_RULES, ContractError, check_sampler


class Plain:
    """A sampler that derives from nothing."""

    def __init__(self, seed=0):
        self.seed, self.step = seed, 0

    def generator(self):
        return np.random.default_rng((self.seed, self.step))

    def ranks(self, rng, total, batch_size):
        return rng.integers(total, size=batch_size)

    def draw(self, view, batch_size):
        total = int(view.starts.lengths.sum()) - view.num_illegal
        if total < 1:
            raise mr.EmptyError("no legal start. Add steps first")
        rng = self.generator()
        env_ids, positions = view.start_at(self.ranks(rng, total, batch_size))
        self.step += 1
        weights = np.ones(batch_size, np.float32)
        probabilities = np.full(batch_size, 1 / total)
        key = int(rng.integers(1 << 63))
        return Draw(env_ids, positions, probabilities, weights, key)

    def state_dict(self):
        return {"kind": "Plain", "seed": self.seed, "step": self.step}

    def load_state_dict(self, state):
        check_kind(state, "Plain")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        self.seed, self.step = seed, step


@pytest.mark.slow
def test_a_sampler_without_the_base_class_passes(tmp_path):
    check_sampler(Plain, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sampler_that_says_what_it_is_passes(tmp_path):
    check_sampler(Says, tmp_path, rules=[TRAITS])


def test_a_sampler_passes_in_a_temporary_folder():
    check_sampler(Plain, rules=["draws_legal_starts"])


class NoStates:
    def __init__(self, seed):
        pass

    def draw(self, view, batch_size):
        raise NotImplementedError


class Wide(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.positions = draw.positions.astype(np.float64)
        return draw


class Square(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.weights = draw.weights[:, None]
        return draw


class Short(Plain):
    def draw(self, view, batch_size):
        return super().draw(view, batch_size).taken(np.arange((batch_size + 1) // 2))


class Impossible(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.probabilities *= 0
        return draw


class Infinite(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.weights *= np.float32(np.inf)
        return draw


class Keyless(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.key = -1
        return draw


class Pairs(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        return draw.env_ids, draw.positions


class Any(Plain):
    """Draws rows of the span, legal or not."""

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        rng, span = self.generator(), view.span
        lengths = span.lengths[draw.env_ids]
        draw.positions = span.first[draw.env_ids] + rng.integers(lengths)
        return draw


class Oldest(Plain):
    """Remembers the rows of its first draw."""

    known = None

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        uuid, generation = view.home.uuid, view.home.generation
        if self.known is None or self.known[0] != (uuid, generation, batch_size):
            self.known = ((uuid, generation, batch_size), draw.env_ids, draw.positions)
        draw.env_ids, draw.positions = self.known[1:]
        return draw


class Resized(Plain):
    """Remembers the span until a ring is resized, and beyond."""

    first = None

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        if self.first is None:
            self.first = view.span.first.copy()
        if view.home.generation > 1:
            draw.positions = self.first[draw.env_ids]
        return draw


class Stale(Plain):
    """Knows of no step, since it never reads the starts."""

    def draw(self, view, batch_size):
        raise mr.EmptyError("no legal start. Add steps first")


class Narrow(Plain):
    """Positions in 32 bits."""

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.positions = draw.positions.astype(np.int32).astype(np.int64)
        return draw


class Lower(Plain):
    def ranks(self, rng, total, batch_size):
        return rng.integers(max(1, total // 2), size=batch_size)


class Zero(Plain):
    def draw(self, view, batch_size):
        if int(view.starts.lengths.sum()) - view.num_illegal < 1:
            nothing = np.zeros(0, np.int64)
            return Draw(nothing, nothing, np.zeros(0), np.zeros(0, np.float32))
        return super().draw(view, batch_size)


class Nothing(Plain):
    def draw(self, view, batch_size):
        if int(view.starts.lengths.sum()) - view.num_illegal < 1:
            return None
        return super().draw(view, batch_size)


class Divides(Plain):
    def draw(self, view, batch_size):
        total = int(view.starts.lengths.sum()) - view.num_illegal
        1 // total
        return super().draw(view, batch_size)


class Counts(Plain):
    def draw(self, view, batch_size):
        self.step += 1
        return super().draw(view, batch_size)


class Unseeded(Plain):
    def generator(self):
        return np.random.default_rng()


class OneSeed(Plain):
    def generator(self):
        return np.random.default_rng(self.step)


class OneStep(Plain):
    def generator(self):
        return np.random.default_rng(self.seed)


class Global(Plain):
    def ranks(self, rng, total, batch_size):
        np.random.random()  # noqa: NPY002
        return super().ranks(rng, total, batch_size)


class GlobalPython(Plain):
    def ranks(self, rng, total, batch_size):
        random.random()
        return super().ranks(rng, total, batch_size)


class Writes(Plain):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        view.starts.first[:] += 1
        return draw


class Holds(Plain):
    def state_dict(self):
        return super().state_dict() | {"generator": self.generator()}


class Moves(Plain):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.state = {"kind": "Plain", "seed": seed, "step": 0}

    def state_dict(self):
        self.state["step"] = self.step
        self.state["seed"] = self.seed
        return self.state

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        self.state["step"] = self.step
        return draw


class Forgets(Plain):
    def state_dict(self):
        return super().state_dict() | {"step": 0}


class Trusts(Plain):
    def load_state_dict(self, state):
        self.seed, self.step = state["seed"], state["step"]


class Accepts(Plain):
    def load_state_dict(self, state):
        if isinstance(state, dict) and {"seed", "step"} <= set(state):
            self.seed, self.step = state["seed"], state["step"]


class Halves(Plain):
    """Takes the seed over before it looks at the step."""

    def load_state_dict(self, state):
        check_kind(state, "Plain")
        self.seed = stored_integer(state, "seed")
        self.step = stored_integer(state, "step")


class Crashes(Plain):
    def load_state_dict(self, state):
        check_kind(state, "Plain")
        self.seed, self.step = int(state["seed"]), int(state["step"])


class Closures(Plain):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.function = lambda: seed


class CopiesAnew(Plain):
    def __getstate__(self):
        return {"seed": self.seed + 1, "step": 0}


class Shared(Plain):
    """Fills the same array at each draw."""

    array = None

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        if self.array is None:
            self.array = draw.positions.copy()
        self.array[:] = draw.positions
        draw.positions = self.array
        return draw


class Endless(mr.ShuffledSampler):
    def more(self, view, batch_size):
        return self.epoch == 0 or super().more(view, batch_size)

    def num_batches(self, view, batch_size):
        return super().num_batches(view, batch_size) + 1


class Hasty(Plain):
    def draw(self, view, batch_size):
        self.step += 1
        return super().draw(view, batch_size)


class Half(mr.MixtureSampler):
    def __init__(self, seed=0):
        parts = [(mr.UniformSampler(seed), 1), (mr.UniformSampler(seed + 1), 1)]
        super().__init__(parts, seed=seed)

    def draw(self, view, batch_size):
        draws = [part.draw(view, batch_size) for part in self.parts]
        self._step += 1
        return draws[0]

    def state_dict(self, priorities=False):
        return super().state_dict() | {"parts": [], "own": self._step}


class Secret(Plain):
    """Draws by a number that is not in its state."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.turn = 0

    def generator(self):
        self.turn += 1
        return np.random.default_rng((self.seed, self.turn))


class Silent(mr.PrioritizedSampler):
    def update_priorities(self, view, env_ids, positions, values, mask=None):
        super().update_priorities(view, env_ids, positions, values, mask)
        return 0


class Tolerant(mr.PrioritizedSampler):
    def update_priorities(self, view, env_ids, positions, values, mask=None):
        return super().update_priorities(view, env_ids, positions, np.abs(values), mask)


class Ahead(mr.PrioritizedSampler):
    def update_priorities(self, view, env_ids, positions, values, mask=None):
        positions = np.minimum(positions, view.span.stop[env_ids] - 1)
        return super().update_priorities(view, env_ids, positions, values, mask)


class OneByOne(mr.PrioritizedSampler):
    def update_priorities(self, view, env_ids, positions, values, mask=None):
        update = super().update_priorities
        steps = [slice(i, i + 1) for i in range(len(values))]
        return sum(update(view, env_ids[s], positions[s], values[s]) for s in steps)


class WithoutValues(mr.PrioritizedSampler):
    def state_dict(self, priorities=False):
        return super().state_dict()


class Pretends(Plain):
    keeps_priorities = False

    def update_priorities(self, view, env_ids, positions, values, mask=None):
        return 0


class Says(Plain):
    """A sampler of single steps, whose traits are those of the class."""

    traits = Traits(STEPS)


class SaysWindows(Says):
    traits = Traits("windows of 2 steps", 2)


class SaysSteps(mr.SequenceSampler):
    traits = Traits(STEPS)


class SaysOtherWindows(mr.SequenceSampler):
    traits = Traits("windows of 2 steps", 2, ("reward",))


class SaysDistinct(Says):
    traits = Traits(STEPS, distinct=True, memory=True)


class SaysNoMemory(Says):
    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        self.step += batch_size
        return draw


class SaysNoEpochs(Says):
    def more(self, view, batch_size):
        return False


class SaysNoEpochsThatEnd(mr.ShuffledSampler):
    traits = Traits(STEPS, ends=True, once=True, memory=True)


class ChangesItsMind(Says):
    @property
    def traits(self):
        return Traits(STEPS, memory=self.step > 0)


class SaysShares(Says):
    """Draws the first starts more often, and over several buffers all alike."""

    traits = Traits(STEPS, divides=SHARES)

    def ranks(self, rng, total, batch_size):
        return (rng.random(batch_size) ** 2 * total).astype(np.int64)


class OfOneBuffer(Sampler):
    """Says probabilities among all buffers in a draw from its own."""

    def __init__(self, seed=0):
        self._random = StepGenerator(seed)

    def draw_at(self, view, shares):
        draw = super().draw_at(view, shares)
        draw.probabilities[:] = 0.001
        return draw

    def state_dict(self):
        return {"kind": "OfOneBuffer", "seed": self._random.seed, "step": self._step}

    def load_state_dict(self, state):
        self._random, self._step = StepGenerator(state["seed"]), state["step"]


class OtherMass(mr.UniformSampler):
    divides = SHARES

    def mass(self, view, step):
        return replace(super().mass(view, step), total=1.0)


class Unweighed(mr.PrioritizedSampler):
    def joint_weights(self, step, masses):
        return JointWeights(0.0, 1.0)


class OtherWindows(mr.SequenceSampler):
    def draw_at(self, view, shares):
        draw = super().draw_at(view, shares)
        draw.windows.positions[:, -1] -= 1
        return draw


class RanksTwice(mr.ShuffledSampler):
    def draw_at(self, view, shares):
        return super().draw_at(view, shares / 2)


def of_windows(kind):
    def make(seed):
        return kind(2, mr.UniformSampler(seed))

    return make


def prioritized(kind):
    def make(seed):
        return kind(seed=seed, name=None)

    return make


ARRAYS, LEGAL = "draws_the_promised_arrays", "draws_legal_starts"
PRIORITIES = "updates_priorities"
TRAITS = "is_what_its_traits_say"
FAILED = "failed_draws_leave_all_as_before"
JOINT = "joint_draws_as_alone"
BROKEN = [
    (NoStates, ARRAYS, "sampler must have draw, state_dict"),
    (Pairs, ARRAYS, "draw returned tuple. Return a mmreplay.samplers.base.Draw"),
    (Wide, ARRAYS, "positions of a draw is float64. Make it"),
    (Square, ARRAYS, r"weights of a draw has the shape \(1, 1\)"),
    (Short, ARRAYS, "for a batch_size of 7, which has 29 legal starts. Return"),
    (Impossible, ARRAYS, "probabilities are between 0.0 and 0.0"),
    (Infinite, ARRAYS, "weights are between inf and inf"),
    (Keyless, ARRAYS, "key is -1. Give an integer"),
    (Stale, ARRAYS, r"a view with 29 legal starts. Read view\.starts first in each draw"),
    (Any, LEGAL, "steps are no legal start of .*, such as position .* view.start_at"),
    (Narrow, LEGAL, "steps are not in the buffer of positions beyond 2"),
    (Lower, "draws_every_legal_start", "never drew .* legal starts, such as"),
    (Zero, "refuses_an_empty_view", r"drew \[\] where no row is a legal start"),
    (Nothing, "refuses_an_empty_view", "drew NoneType where no row is a legal start"),
    (Divides, "refuses_an_empty_view", "raised ZeroDivisionError"),
    (Counts, "refuses_an_empty_view", "changed the state from .*'step': 0"),
    (Unseeded, "draws_by_seed", "batch 0 of seed 5 is .* and then"),
    (OneSeed, "draws_by_seed", "seeds 5 and 6 both draw"),
    (OneStep, "draws_anew_each_time", "6 batches are all"),
    (Global, "leaves_global_generators_alone", "the state of numpy.random"),
    (GlobalPython, "leaves_global_generators_alone", "the state of random"),
    (Writes, "leaves_the_view_alone", "a draw changed an array of the view"),
    (Holds, "saves_plain_states", "state_dict holds Generator"),
    (Moves, "saves_plain_states", "a draw changed the state returned before"),
    (Forgets, "continues_from_a_state", "after 1 draws the saved sampler went on with"),
    (Trusts, "refuses_foreign_states", r"load_state_dict\(None\) raised TypeError"),
    (Accepts, "refuses_foreign_states", r"load_state_dict\(None\) was accepted"),
    (Halves, "refuses_damaged_states", "was refused and changed the sampler"),
    (Crashes, "refuses_damaged_states", "raised KeyError .*Raise mmreplay.FormatError"),
    (Closures, "copies_by_pickle", "pickle raised"),
    (CopiesAnew, "copies_by_pickle", "the original drew .*, its copy"),
    (Oldest, "follows_a_writer", "steps are not in the buffer of .* Read view.starts in"),
    (Resized, "follows_a_resize", "of a buffer resized to"),
    (Any, "draws_from_restricted_views", "steps are no legal start of .* within <Part"),
    (Shared, "gathers_what_it_drew", "a batch says that its steps are"),
    (Hasty, FAILED, "its state was .*'step': 0.* before a draw that raised, and .*1"),
    (Half, FAILED, "after a draw that raised it drew"),
    (
        Secret,
        "failed_batches_leave_all_as_before",
        "after a sample whose transform raised it drew .* into the state",
    ),
    (Endless, "goes_through_epochs", "epoch 0 had .* batches, num_batches returned"),
    (SaysWindows, TRAITS, "drew single steps, and traits.form is 'windows of 2"),
    (of_windows(SaysSteps), TRAITS, "drew windows of 2 steps, and traits.form is 's"),
    (of_windows(SaysOtherWindows), TRAITS, r"first_only=\(\), and the traits say 2 and"),
    (SaysDistinct, TRAITS, "steps twice, and traits.distinct is True"),
    (SaysNoMemory, TRAITS, "after three draws of 2 steps it drew .* of 5"),
    (SaysNoEpochs, TRAITS, "before the first draw, and traits.ends is False"),
    (SaysNoEpochsThatEnd, TRAITS, "ends is True, and traits.epochs False"),
    (ChangesItsMind, TRAITS, "traits were .* before it drew, and are"),
    (SaysShares, JOINT, "was drawn .* times from one buffer and .* times from several"),
    (OfOneBuffer, JOINT, "has probability 0.001 in one buffer and"),
    (OtherMass, JOINT, "has probability .* in one buffer and .* in several buffers as one"),
    (prioritized(Unweighed), JOINT, "weights of a draw from one buffer are .*, and joint_w"),
    (of_windows(OtherWindows), JOINT, "has the window .* in one buffer and .* in several"),
    (RanksTwice, JOINT, "all ranks of several buffers drew .* steps, .* times, and those"),
    (prioritized(Silent), PRIORITIES, "returned 0 where .* steps were overwritten"),
    (prioritized(Tolerant), PRIORITIES, "negative priorities were accepted"),
    (prioritized(Ahead), PRIORITIES, "priorities of a position never written were"),
    (prioritized(OneByOne), PRIORITIES, "was refused and changed the priorities"),
    (prioritized(WithoutValues), PRIORITIES, "loaded its state with"),
    (Pretends, PRIORITIES, "whose keeps_priorities is False were accepted"),
]


@pytest.mark.parametrize(
    ("make", "rule", "message"), BROKEN, ids=[f"{each[0].__name__}-{each[1]}" for each in BROKEN]
)
def test_a_broken_sampler_is_refused(make, rule, message, tmp_path):
    with pytest.raises(ContractError, match=f"(?s)breaks rule '{rule}' .*{message}"):
        check_sampler(make, tmp_path, rules=[rule])


def test_every_rule_has_a_sampler_that_breaks_it():
    assert set(SAMPLER_RULES) == {rule for _, rule, _ in BROKEN}


def test_the_folder_of_a_broken_rule_stays(tmp_path):
    with pytest.raises(ContractError) as caught:
        check_sampler(Any, tmp_path)
    assert caught.value.rule == LEGAL
    assert [path.name.startswith(LEGAL) for path in tmp_path.iterdir()] == [True]


def test_errors_of_the_sampler_itself_are_passed_on_with_the_rule(tmp_path):
    class Breaks(Plain):
        def draw(self, view, batch_size):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        check_sampler(Breaks, tmp_path, rules=[LEGAL])
    assert caught.value.__notes__ == [f"raised while rule {LEGAL!r} checked Breaks"]


def test_an_unknown_rule_is_refused():
    with pytest.raises(mr.SchemaError, match=r"rules must be among .*, got 'no_rule'"):
        check_sampler(Plain, rules=["no_rule"])

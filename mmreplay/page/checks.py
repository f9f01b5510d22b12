"""What stands out: findings about a buffer, each with a number and its consequence.

Each check is a function of numbers that were counted before. It returns a finding, a
fine one where nothing stands out, or None where the buffer has nothing to check.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from mmreplay.errors import CorruptError, ReplayError
from mmreplay.page.sample import FEW_VALUES, FieldFacts, component_name
from mmreplay.page.sections import MIN_ROWS, RowRepeats, Steps, looked_at

Level = Literal["problem", "look", "fine"]
logger = logging.getLogger(__name__)
LEVELS: tuple[Level, ...] = ("problem", "look", "fine")

RARE_REWARDS = 1e-4
FEW_EXPECTED = 12
"""Rewards: of an environment that has none, though it would have so many if it were as
the others are."""
GREW, SHRANK = 100.0, 200.0
REPEATED, REPEATED_STATE, REPEATED_ROW = 0.05, 0.7, 0.4
"""Shares of rows that equal the one before: of numbers that hardly ever do; of states,
such as a cell of a grid; of states with the action and the reward."""
REPEATED_IN_SECTION = 0.2
FROZEN_FRAMES, FROZEN_LATELY = 0.7, 0.95
FRAMES_TWICE, FRAMES_TWICE_IN_SECTION = 0.18, 0.35
"""Games stand still for seconds, in one stretch, and repeat every tenth frame alone."""
MANY_VALUES = 20
"""More make a component continuous."""
SATURATED, MOSTLY_SATURATED = 0.2, 0.6
CLIPPED, CLIPPED_EACH, SWITCHED = 0.5, 0.05, 0.98
"""Shares at both ends; where more lie there it is a switch, such as a contact."""
ONE_ACTION, ONE_OF_SEVERAL, ONE_IN_SECTION = 0.9, 0.95, 0.97
LARGER = 1e5
DOMINATES = 0.5
BOTH_FLAGS = 0.2
ENDLESS = 2.0
USUAL_LIMIT = 1000
"""Steps: the time limit of most environments, before which no end is missed."""
UNKNOWN_NEXT = 0.01
BEHIND, MIN_BEHIND = 0.05, 64
UNTOUCHED = 0.95
MOST_FINE = 3
"""Findings of one check that say that a field is fine; others are counted."""
TOP_SHARE, FEW_EFFECTIVE = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class PageFinding:
    """One finding.

    Attributes:
        level: ``"problem"``, ``"look"`` or ``"fine"``.
        id: Of the check.
        title: A few words.
        text: The numbers, and what follows from them.
        to: Where it is seen: an anchor of the overview.
        failed: The check failed, and found nothing.
    """

    level: Level
    id: str
    title: str
    text: str
    to: str
    failed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


Result = PageFinding | None | Iterable[PageFinding | None]


def run_check(name: str, to: str, check: Callable[[], Result]) -> list[PageFinding]:
    """Run a check; one that fails is a finding itself, and takes no other with it.

    Args:
        name: What is checked, the `PageFinding.id` of its findings.
        to: As of `PageFinding`.
        check: Returns what it found.
    """
    try:
        found = check()
        several = [found] if isinstance(found, PageFinding | None) else found
        return [finding for finding in several if finding is not None]
    except Exception as error:  # whatever fails, the others are worth reading
        reason = str(error)
        if not isinstance(error, ReplayError | OSError) or not reason:
            logger.exception("check %r failed", name)
            reason = f"{type(error).__name__}."
        level: Level = "problem" if isinstance(error, CorruptError) else "look"
    title = f"{name[0].upper()}{name[1:]} could not be computed"
    return [PageFinding(level, name, title, f"The check failed: {reason}", to, True)]


def check_rewards(rewards: Sequence[FieldFacts]) -> list[PageFinding]:
    """Check that there are rewards, in each environment and to the end, of one scale.

    Args:
        rewards: The fields of the reward; empty where there is none.
    """
    if not rewards:
        return [
            PageFinding(
                "look",
                "rewards",
                "No reward field",
                "Returns cannot be computed. Assign the role with "
                'Schema(fields, roles={"reward": ...}).',
                "fields",
            )
        ]
    facts = rewards[0]
    count = sum(reward.moments.count for reward in rewards)
    if count == 0:
        return [
            PageFinding(
                "problem",
                "rewards",
                "No finite reward",
                f"All {facts.size:,} rewards are NaN or infinite.",
                "rewards",
            )
        ]
    rows = facts.rows
    share = max(reward.nonzero for reward in rewards) / rows
    if share == 0:
        return [
            PageFinding(
                "problem",
                "rewards",
                "Every reward is 0",
                f"None of {rows:,} rewards differs from 0. Nothing can be learned from them.",
                "rewards",
            )
        ]
    found = [*_rewards_by_section(rewards)]
    for reward in rewards:
        found += _reward_scale(reward)
    if share < RARE_REWARDS:
        found.append(
            PageFinding(
                "look",
                "rewards",
                "Rewards are rare",
                f"{_share(share)} of steps have a reward other than 0: most batches have none.",
                "rewards",
            )
        )
    if found:
        return found
    return [_fine_rewards(rewards, rows, share)]


def _fine_rewards(rewards: Sequence[FieldFacts], rows: int, share: float) -> PageFinding:
    """What is said of rewards where nothing is odd: a share of the rows has one."""
    envs = [len(each.rewards.rows) for each in rewards if each.rewards is not None]
    by_env = _rewarded_envs(rewards)[1]
    looked = looked_at(rows, rewards[0].complete, len(by_env), max(envs, default=1))
    low = min(reward.moments.min for reward in rewards if reward.moments.count)
    high = max(reward.moments.max for reward in rewards if reward.moments.count)
    if low == high:
        left_out = any(reward.moments.nonfinite for reward in rewards)
        return PageFinding(
            "fine",
            "rewards",
            f"Every reward is {_number(low)}",
            f"{'Of those that are finite; a' if left_out else 'A'} return says how "
            f"long the episode is. Looked at: {looked}.",
            "rewards",
        )
    return PageFinding(
        "fine",
        "rewards",
        "Rewards vary",
        f"{_share(share)} of steps have a reward other than 0. They lie between "
        f"{_number(low)} and {_number(high)}. Looked at: {looked}.",
        "rewards",
    )


def _rewarded_envs(rewards: Sequence[FieldFacts]) -> tuple[list[int], list[int]]:
    """Return the environments without a reward, and those that it is known of."""
    facts = [each.rewards for each in rewards if each.rewards is not None]
    if not facts:
        return [], []
    rows = facts[0].rows
    nonzero = np.sum([each.nonzero for each in facts], axis=0)
    expected = rows * (nonzero.sum() / max(1, rows.sum()))
    silent = ((nonzero == 0) & (expected >= FEW_EXPECTED)).nonzero()[0].tolist()
    known = ((nonzero > 0) | (expected >= FEW_EXPECTED)).nonzero()[0].tolist()
    return silent, known


def _rewards_by_section(rewards: Sequence[FieldFacts]) -> Iterator[PageFinding]:
    """Find environments without a reward, and newest steps without one."""
    silent, _ = _rewarded_envs(rewards)
    facts = [each.rewards for each in rewards if each.rewards is not None]
    if silent:
        rows = int(facts[0].rows[silent[0]])
        share = max(each.nonzero / each.rows for each in rewards)
        name = f"environment {silent[0]}"
        more = _and_more(len(silent) - 1)
        yield PageFinding(
            "look",
            "rewards",
            f"No reward in {name}{more}",
            f"All {rows:,} rewards of {name} that were looked at are 0; of all steps, "
            f"{_share(share)} have one.",
            "rewards",
        )
    if not facts:
        return
    rows = facts[0].newest_rows
    nonzero = sum(each.newest_nonzero for each in facts)
    share = max(each.nonzero / each.rows for each in rewards)
    if not nonzero and rows * share >= FEW_EXPECTED:
        yield PageFinding(
            "look",
            "rewards",
            "No reward in the newest quarter",
            f"None of its {rows:,} rewards that were looked at differs from 0; of all "
            f"steps, {_share(share)} have one.",
            "rewards",
        )


def _reward_scale(reward: FieldFacts) -> Iterator[PageFinding]:
    """Find rewards of another scale: single ones, or the newest."""
    facts = reward.rewards
    if facts is None:
        return
    if facts.outliers:
        few = "1 reward is" if facts.outliers == 1 else f"{facts.outliers:,} rewards are"
        yield PageFinding(
            "look",
            "reward scale",
            f"{few} far beyond the others",
            f"The largest of {reward.path} is {_number(facts.outlier)}; 99 % of those "
            f"other than 0 have a size of at most {_number(facts.usual)}. One such "
            "step outweighs a batch.",
            "rewards",
        )
    old_median, old_high = facts.old_size
    median, newest_high, high = facts.new_size
    if high >= GREW * old_high:
        ratio, old, new = high / old_high, old_high, high
    elif (
        # Of a policy that learns, costs fall to nothing, but for the first steps.
        median > 0 and old_median >= SHRANK * median and old_high >= SHRANK * newest_high
    ):
        ratio, old, new = old_median / median, old_median, median
    else:
        return
    times = f"{_number(round(ratio))} times {'larger' if new > old else 'smaller'}"
    yield PageFinding(
        "look",
        "reward scale",
        f"Newest rewards are {times}",
        f"The size of {reward.path} went from about {_number(old)} in the oldest "
        f"quarter to {_number(new)}. Values learned from one do not fit the other.",
        "rewards",
    )


def check_finite(fields: Sequence[FieldFacts]) -> list[PageFinding]:
    """Check that no value is NaN or infinite; one finding for each field with some."""
    found = []
    for facts in fields:
        if facts.moments.nonfinite:
            looked = "" if facts.complete else " in the sample"
            found.append(
                PageFinding(
                    "problem",
                    "not finite",
                    f"Not finite: {facts.path}",
                    f"{facts.num_nan:,} NaN and {facts.num_infinite:,} infinite of "
                    f"{facts.size:,} values{looked}. One of them in a batch makes the "
                    "loss NaN.",
                    f"field:{facts.path}",
                )
            )
    unread = [facts.path for facts in fields if facts.unread]
    read = [facts for facts in fields if not facts.unread]
    if found or not read:
        return found
    text = "No NaN and no infinity in what was looked at: "
    text += _rows_looked_at(read)
    if unread:
        text += f" The values of {_names(unread)} were not looked at."
    title = "All values are finite"
    if unread or not all(facts.complete for facts in read):
        title = "All values looked at are finite"
    return [PageFinding("fine", "not finite", title, text, "fields")]


def check_constant(facts: FieldFacts) -> PageFinding | None:
    """Check that an observation changes, and each component of an action."""
    if facts.rows < MIN_ROWS or facts.role not in ("observation", "action"):
        return None
    constant = len(facts.constant)
    to = f"field:{facts.path}"
    if facts.image is not None:
        if constant < facts.num_components:
            return None
        return PageFinding(
            "problem",
            "never changes",
            f"Never changes: {facts.path}",
            f"All {facts.rows:,} frames looked at are equal.",
            to,
        )
    if _is_choice(facts):
        return None  # One discrete action is a finding of its own.
    if not constant:
        return _check_stopped(facts)
    name = component_name(facts.path, int(facts.constant[0]), facts.shape)
    more = _and_more(constant - 1)
    finite = "finite " if facts.moments.nonfinite else ""
    text = (
        f"{constant:,} of {facts.num_components:,} components "
        f"{'has' if constant == 1 else 'have'} one {finite}value in all "
        f"{facts.rows:,} rows looked at ({name} is {_number(facts.constant_value)}). "
    )
    if facts.role == "observation" and constant < facts.num_components:
        return _check_stopped(facts) or PageFinding(
            "fine",
            "never changes",
            f"All components but {constant:,} change",
            f"{text}Many environments have some, such as the height of a table.",
            to,
        )
    return PageFinding(
        "look",
        "never changes",
        f"Never changes: {name}{more}",
        f"{text}A network learns nothing from it.",
        to,
    )


def _check_stopped(facts: FieldFacts) -> PageFinding | None:
    """Check that no component of an observation stops to change."""
    spread = facts.spread
    if facts.role != "observation" or spread is None:
        return None
    stopped = (spread.stopped & (spread.num_values > MANY_VALUES)).nonzero()[0].tolist()
    if not stopped:
        return None
    name = component_name(facts.path, stopped[0], facts.shape)
    more = _and_more(len(stopped) - 1)
    return PageFinding(
        "look",
        "never changes",
        f"No longer changes: {name}{more}",
        f"In the newest eighth, of several episodes, {name} has one value; before, it had many.",
        f"field:{facts.path}",
    )


def check_changes(fields: Sequence[FieldFacts]) -> list[PageFinding]:
    """Check observations and actions with `check_constant`."""
    checked: list[FieldFacts] = []
    left_out: list[str] = []
    for facts in fields:
        if facts.role in ("observation", "action"):
            if facts.rows >= MIN_ROWS and not facts.varies:
                checked.append(facts)
            else:
                left_out.append(facts.path)
    found = [finding for facts in checked if (finding := check_constant(facts))]
    if found or not checked or any(len(each.constant) for each in checked if each.image is None):
        return found
    return [_all_change(checked, left_out)]


def _all_change(checked: Sequence[FieldFacts], left_out: Sequence[str]) -> PageFinding:
    """What is said where no field looked at is constant."""
    images = [facts.image is not None for facts in checked]
    if all(images):
        title, text = "Frames differ", "Not all of them are equal."
    else:
        title = "All components looked at change" if left_out else "All components change"
        text = "Each component of observations and actions has more than one value."
        if any(images):
            text += " Of images, not all frames are equal."
    text += f" Looked at: {_rows_looked_at(checked)}"
    if left_out:
        text += f" Not looked at: {_names(left_out)}."
    return PageFinding("fine", "never changes", title, text, "fields")


def check_repeats(facts: FieldFacts, repeats: RowRepeats, steps: Steps) -> Result:
    """Check that the frames of an image field differ from the frame before.

    Args:
        facts: Of the field.
        repeats: Which of its frames are repeated.
        steps: Of the sample.
    """
    if facts.image is None or facts.role != "observation":
        return None
    if len(facts.constant) == facts.num_components:
        return None  # said by `check_constant`
    sections = repeats.shares(steps)
    if not sections:
        return None
    to = f"field:{facts.path}"
    frozen = [
        section for section in sections if "newest" not in section[0] or section[2] > FROZEN_LATELY
    ]
    found = _worst_section(frozen, FROZEN_FRAMES)
    why = "The camera or the environment stands still."
    if found[2] <= FROZEN_FRAMES:
        alone = repeats.shares(steps, alone=True)
        most = max(alone, key=lambda section: section[2])
        found = alone[0] if alone[0][2] > FRAMES_TWICE else most
        why = "Frames are stored twice, or the camera is slower than the steps."
        if found[2] <= (FRAMES_TWICE_IN_SECTION if found[0] else FRAMES_TWICE):
            found = "", 0, 0.0
    place, count, share = found
    if share:
        where = f" in {place}" if place else ""
        return PageFinding(
            "look",
            "repeated frames",
            f"Repeated frames: {facts.path}{where}",
            f"{_share(share)} of {count:,} frames{where} equal the frame before. {why}",
            to,
        )
    return PageFinding(
        "fine",
        "repeated frames",
        "Frames change",
        f"{_share(sections[0][2])} of the frames of {facts.path} equal the one before. "
        f"Looked at: {_sections_looked_at(sections, facts.complete, steps)}.",
        to,
    )


def check_repeated_rows(
    fields: Sequence[FieldFacts], observed: RowRepeats, with_action: RowRepeats, steps: Steps
) -> PageFinding | None:
    """Check that observations differ from the ones before.

    Args:
        fields: Of the observation and, where they are stored, action and reward.
        observed: Steps with the observation of the step before.
        with_action: Steps with its action and reward, too.
        steps: Of the sample.
    """
    observations = [facts for facts in fields if facts.role == "observation"]
    if not observations or any(facts.varies for facts in observations):
        return None  # Of values that vary, the lengths alone were read.
    if len(observations) == 1 and observations[0].image is not None:
        return None  # said by `check_repeats`
    sections = observed.shares(steps)
    if not sections or all(len(facts.constant) == facts.num_components for facts in observations):
        return None
    # A state on a grid stays when an agent runs against a wall.
    continuous = any(
        facts.kind == "f"
        and facts.spread is not None
        and (facts.spread.num_values > MANY_VALUES).any()
        for facts in observations
    )
    to = f"field:{observations[0].path}"
    most = REPEATED if continuous else REPEATED_STATE
    place, count, share = _worst_section(sections, most)
    what = "observation"
    if share <= most and not continuous:
        of_rows = with_action.shares(steps)
        row = _worst_section(of_rows, REPEATED_ROW) if of_rows else ("", 0, 0.0)
        if row[2] > REPEATED_ROW:
            (place, count, share), most = row, REPEATED_ROW
            what = "observation, action and reward"
    if share > most:
        where = f" in {place}" if place else ""
        return PageFinding(
            "look",
            "repeated rows",
            f"Repeated observations{where}",
            f"{_share(share)} of {count:,} steps{where} have the {what} of the step "
            "before. Either a row is stored twice, or the environment stands still.",
            to,
        )
    complete = all(facts.complete for facts in observations)
    return PageFinding(
        "fine",
        "repeated rows",
        "Observations change",
        f"{_share(sections[0][2])} of steps have the observation of the step before. "
        f"Looked at: {_sections_looked_at(sections, complete, steps)}.",
        to,
    )


def check_saturated(facts: FieldFacts) -> PageFinding | None:
    """Check that continuous actions lie within their range, not at its limits."""
    spread = facts.spread
    if facts.role != "action" or facts.kind != "f" or spread is None:
        return None
    switches = spread.num_values <= FEW_VALUES
    if switches.all() or spread.rows < MIN_ROWS:
        return None
    shares = spread.at_lows + spread.at_highs
    # Of few values many lie at the ends by chance.
    most = (4 / spread.num_values.clip(1)).clip(SATURATED)
    excess = (shares > most) & ~switches
    shares[:, switches] = 0
    if not excess.any():
        note = ""
        if switches.any():
            note = f" of the {int((~switches).sum()):,} with more than {FEW_VALUES} values"
        looked = looked_at(spread.rows, _all_of(facts), spread.num_envs, facts.num_envs)
        return PageFinding(
            "fine",
            "saturated",
            "Actions lie within their range",
            f"At most {_share(float(shares[0].max()))} of the values of a component of "
            f"{facts.path}{note} lie at the ends of its range. Looked at: {looked}.",
            "actions",
        )
    shares[~excess] = 0
    # What all steps show is said of all of them.
    section = 0 if excess[0].any() else int(shares.max(axis=1).argmax())
    worst = int(shares[section].argmax())
    share, place = float(shares[section, worst]), spread.sections[section]
    where = f" in {place}" if place else ""
    name = component_name(facts.path, worst, facts.shape)
    others = int(excess[section].sum()) - 1
    more, whose = _and_more(others), "its values"
    if others:
        whose = f"the values of {name}"
    level: Level = "problem" if share > MOSTLY_SATURATED else "look"
    return PageFinding(
        level,
        "saturated",
        f"Saturated: {name}{more}{where}",
        f"{_share(share)} of {whose}{where} are {_number(spread.lows[worst])} or "
        f"{_number(spread.highs[worst])}, the ends of its range, or lie within 0.5 % "
        "of them. The policy asks for more than the range allows.",
        "actions",
    )


def check_clipped(facts: FieldFacts) -> PageFinding | None:
    """Check that observations do not mostly lie at both ends of their ranges."""
    spread = facts.spread
    if facts.role != "observation" or facts.kind != "f" or spread is None:
        return None
    continuous = spread.num_values > FEW_VALUES
    if spread.rows < MIN_ROWS or not continuous.any():
        return None
    low, high = spread.at_lows[0], spread.at_highs[0]
    shares = low + high
    shares[~continuous] = 0
    clipped = (shares >= CLIPPED) & (low >= CLIPPED_EACH) & (high >= CLIPPED_EACH)
    clipped &= shares <= SWITCHED
    to = f"field:{facts.path}"
    if not clipped.any():
        looked = looked_at(spread.rows, _all_of(facts))
        return PageFinding(
            "fine",
            "clipped",
            "Observations lie within their range",
            f"No component of {facts.path} with more than {FEW_VALUES} values has "
            f"half of them at both ends of its range. Looked at: {looked}.",
            to,
        )
    shares[~clipped] = 0
    worst = int(shares.argmax())
    name = component_name(facts.path, worst, facts.shape)
    others = int(clipped.sum()) - 1
    more = _and_more(others)
    return PageFinding(
        "look",
        "clipped",
        f"Clipped: {name}{more}",
        f"{_share(float(shares[worst]))} of the values of {name} are "
        f"{_number(spread.lows[worst])} or {_number(spread.highs[worst])}, the ends of "
        "its range, or lie within 0.5 % of them. Values beyond the range are not "
        "distinguished.",
        to,
    )


def check_scales(fields: Sequence[FieldFacts]) -> PageFinding | None:
    """Check that no component of the observation is far larger than the others."""
    named: list[tuple[float, str, str]] = []
    checked = [
        (facts, facts.spread)
        for facts in fields
        if facts.role == "observation" and facts.spread is not None
        if facts.spread.rows >= MIN_ROWS and facts.kind == "f"
    ]
    sizes = [float(size) for _, spread in checked for size in spread.sizes if size > 0]
    if len(sizes) < 2:
        return None
    usual = statistics.median_low(sizes)
    for facts, spread in checked:
        for number in (spread.sizes > LARGER * usual).nonzero()[0].tolist():
            name = component_name(facts.path, number, facts.shape)
            named.append((float(spread.sizes[number]), name, facts.path))
    if not named:
        ratio = max(sizes) / usual
        looked = "; ".join(
            f"{facts.path}, {looked_at(spread.rows, _all_of(facts))}"
            for facts, spread in checked[:4]
        )
        more = f"; {len(checked) - 4:,} more fields" if len(checked) > 4 else ""
        return PageFinding(
            "fine",
            "scales",
            "Components have comparable sizes",
            f"The largest is {_number(float(f'{ratio:.2g}'))} times the median one. "
            f"Looked at: {looked}{more}.",
            "fields",
        )
    size, name, path = max(named)
    more = _and_more(len(named) - 1)
    return PageFinding(
        "look",
        "scales",
        f"Much larger than the others: {name}{more}",
        f"The root mean square of {name} is {_number(float(f'{size:.3g}'))}, that of "
        f"the median component {_number(float(f'{usual:.3g}'))}. A network sees the "
        "large one alone: normalize the observation.",
        f"field:{path}",
    )


def check_one_action(facts: FieldFacts) -> PageFinding | None:
    """Check that no component of an action is nearly always the same."""
    spread = facts.spread
    if facts.role != "action" or spread is None or spread.rows < MIN_ROWS:
        return None
    discrete = _is_choice(facts)
    shares = spread.top_shares.copy()
    counted = shares.shape[1]
    # What has one value everywhere is said by `check_constant`.
    shares[:, spread.num_values[:counted] <= (0 if discrete else 1)] = 0
    excess = shares > ONE_IN_SECTION
    excess[0] = shares[0] > (ONE_ACTION if discrete else ONE_OF_SEVERAL)
    if excess.any():
        shares[~excess] = 0
        section = 0 if excess[0].any() else int(shares.max(axis=1).argmax())
        worst = int(shares[section].argmax())
        place, top = (spread.sections[section], _number(spread.top_values[section, worst]))
        where = f" in {place}" if place else ""
        name = component_name(facts.path, worst, facts.shape)
        others = int(excess[section].sum()) - 1
        more = _and_more(others)
        what = top if discrete else f"{name} is {top}{more}"
        level: Level = "problem" if discrete else "look"
        return PageFinding(
            level,
            "one action",
            f"Nearly always one action{where}: {what}",
            f"{_share(float(shares[section, worst]))} of steps{where} have it. Other "
            "actions are hardly tried.",
            "actions",
        )
    looked = looked_at(spread.rows, _all_of(facts), spread.num_envs, facts.num_envs)
    if discrete:
        top = _number(spread.top_values[0, 0])
        number = (spread.sizes > 0).sum() if spread.one_hot else spread.num_values[0]
        return PageFinding(
            "fine",
            "one action",
            "Actions vary",
            f"{number:,} different ones. The most frequent, {top}, is in "
            f"{_share(float(shares[0, 0]))} of steps. Looked at: {looked}.",
            "actions",
        )
    some = "component"
    if counted < facts.num_components:
        some = f"one of the first {counted:,} components"
    return PageFinding(
        "fine",
        "one action",
        "Actions vary",
        f"No {some} of {facts.path} has one value in more than "
        f"{_share(ONE_OF_SEVERAL)} of steps. Looked at: {looked}.",
        "actions",
    )


def check_ends(ends: Mapping[str, int], longest: int) -> PageFinding:
    """Check how episodes end.

    Args:
        ends: Episodes by kind: ``"terminated"``, ``"truncated"``, ``"both"`` and
            ``"broken off"``.
        longest: Steps of the longest episode, whether it has ended or not.
    """
    terminated, truncated, both = ends["terminated"], ends["truncated"], ends["both"]
    broken = ends["broken off"]
    total = terminated + truncated + both + broken
    if total == 0:
        level: Level = "look" if longest > USUAL_LIMIT else "fine"
        return PageFinding(
            level,
            "ends",
            "No episode has ended yet",
            f"The longest has {longest:,} steps so far. Returns and lengths are known "
            "once one has ended.",
            "ends",
        )
    if both > BOTH_FLAGS * total:
        return PageFinding(
            "look",
            "ends",
            f"{both:,} of {total:,} ends are terminated and truncated",
            "Both flags are set, so targets do not bootstrap there. Where a time limit "
            "alone ends an episode, pass truncated alone.",
            "ends",
        )
    title, why = "Episodes end as the environment says", ""
    if truncated == total:
        why = ". Targets must bootstrap at the end"
    elif broken:
        title = f"{broken:,} of {total:,} episodes were broken off"
        why = ": a writer stopped within them"
    kinds = [f"{terminated:,} terminated", f"{truncated:,} truncated"]
    kinds += [f"{both:,} terminated and truncated"] if both else []
    return PageFinding(
        "fine", "ends", title, f"{', '.join(kinds)}, {broken:,} broken off{why}.", "ends"
    )


def check_endless(longest: int, ended: int, running: Sequence[int]) -> Result:
    """Check that no environment goes on without an end.

    Args:
        longest: Steps of the longest episode that has ended.
        ended: Episodes that have.
        running: Steps of each environment's only episode, which has not ended; 0 for
            environments where one has.
    """
    if len(running) < 2 or not ended:
        return None
    never = [
        env_id for env_id, steps in enumerate(running) if steps >= max(MIN_ROWS, ENDLESS * longest)
    ]
    if never:
        name = f"environment {never[0]}"
        more = _and_more(len(never) - 1)
        return PageFinding(
            "look",
            "never ends",
            f"No episode ends in {name}{more}",
            f"It has {running[never[0]]:,} steps without an end. The longest of "
            f"{ended:,} episodes that have ended elsewhere has {longest:,}.",
            "ends",
        )
    some = sum(steps > 0 for steps in running)
    title, text = "Episodes end in every environment", f"Looked at: {len(running):,}."
    if some:
        title = f"Episodes end in {len(running) - some:,} of {len(running):,} environments"
        text = (
            f"The others have fewer than {_number(ENDLESS)} times the steps of the "
            "longest episode that has ended."
        )
    return PageFinding("fine", "never ends", title, text, "ends")


def check_dominates(longest: int, steps: int, episodes: int) -> PageFinding | None:
    """Check that no single episode holds most steps.

    Args:
        longest: Steps of the longest episode.
        steps: Steps of all episodes.
        episodes: How many there are.
    """
    if episodes < 2 or not steps:
        return None
    share = longest / steps
    if share > DOMINATES:
        return PageFinding(
            "look",
            "dominates",
            "One episode dominates",
            f"It has {longest:,} of {steps:,} steps ({_share(share)}). Batches are mostly from it.",
            "lengths",
        )
    return PageFinding(
        "fine",
        "dominates",
        "No episode dominates",
        f"The longest has {_share(share)} of all steps.",
        "lengths",
    )


def check_unknown_next(num_unknown: int, steps: int) -> PageFinding | None:
    """Check that the next observations of nearly all steps are known.

    Args:
        num_unknown: Steps whose next observation is not stored.
        steps: All steps.
    """
    if not steps or num_unknown <= UNKNOWN_NEXT * steps:
        return None
    return PageFinding(
        "look",
        "next unknown",
        "Steps whose next observation is unknown",
        f"{num_unknown:,} of {steps:,} steps ({_share(num_unknown / steps)}): single "
        "draws leave them out. Pass final_observation= to add where an episode is "
        "truncated, or draw with the transform WithoutNext.",
        "storage",
    )


def check_heap(fit: int | None, capacity: int) -> PageFinding | None:
    """Check that the heap has the bytes for half of the rows at least.

    Args:
        fit: Rows whose values fit into a heap; None where that is not known, or where
            no field varies.
        capacity: Rows of each environment.
    """
    if fit is None or 2 * fit >= capacity:
        return None
    return PageFinding(
        "look",
        "heap",
        "The heap is too small for half of the rows",
        f"The values of about {fit:,} of {capacity:,} rows fit into it: older rows are "
        "dropped for want of space. Pass more heap_bytes to resize.",
        "storage",
    )


def check_behind(heads: Sequence[int]) -> PageFinding | None:
    """Check that no environment is far behind the furthest.

    Args:
        heads: Rows ever written by each environment.
    """
    if len(heads) < 2:
        return None
    highest, lowest = max(heads), min(heads)
    lag, most = highest - lowest, max(MIN_BEHIND, BEHIND * highest)
    if lag > most:
        last, furthest = list(heads).index(lowest), list(heads).index(highest)
        count = sum(highest - head > most for head in heads)
        title, rest = f"Environment {last} is behind", "the others are not behind."
        if count > 1:
            title = f"{count:,} environments are behind"
            rest = f"{count:,} of {len(heads):,} environments are behind."
        return PageFinding(
            "look",
            "behind",
            title,
            f"Environment {last} has {lag:,} rows less than environment {furthest}, "
            f"the furthest, which has {highest:,}; {rest}",
            "storage",
        )
    return PageFinding(
        "fine",
        "behind",
        "Environments are in step",
        f"They differ by {lag:,} {'row' if lag == 1 else 'rows'} at most.",
        "storage",
    )


def check_reset_rows(clause: str | None) -> PageFinding | None:
    """Report rows after episode ends that look like resets.

    Args:
        clause: What `mmreplay.episodes.rules.find_reset_rows` found.
    """
    if clause is None:
        return None
    return PageFinding(
        "problem",
        "reset rows",
        "Reset rows are stored as steps",
        f"{clause[0].upper()}{clause[1:]}. Such rows are no steps of the "
        'environment: create the buffer with autoreset="next_step".',
        "episodes",
    )


def check_priorities(
    top_share: float, effective: float, common_share: float, alpha: float
) -> PageFinding:
    """Check that priorities are updated, and spread over the rows.

    Args:
        top_share: Share of the mass that the top 1 % of rows have, at alpha.
        effective: Effective sample size as a share of the rows, at alpha.
        common_share: Share of the rows with the most frequent priority.
        alpha: Exponent of the priorities.
    """
    if common_share > UNTOUCHED:
        return PageFinding(
            "look",
            "priorities",
            "Priorities are hardly updated",
            f"{_share(common_share)} of rows have the priority that new rows enter at. "
            "Call update_priorities after each batch.",
            "priorities",
        )
    spread = (
        f"The top 1 % of rows have {_share(top_share)} of the mass at alpha {alpha:g}. "
        f"Draws are worth {_share(effective)} of the rows."
    )
    if top_share > TOP_SHARE or effective < FEW_EFFECTIVE:
        title = "Few rows take most draws"
        return PageFinding("look", "priorities", title, spread, "priorities")
    return PageFinding("fine", "priorities", "Priorities are spread", spread, "priorities")


def folded(findings: Sequence[PageFinding]) -> list[PageFinding]:
    """Return findings, of one check 3 that are fine and the number of others."""
    kept: list[PageFinding] = []
    fine: dict[str, list[PageFinding]] = {}
    for finding in findings:
        if finding.level != "fine":
            kept.append(finding)
        else:
            fine.setdefault(finding.id, []).append(finding)
    for name, some in fine.items():
        kept += some[:MOST_FINE]
        left = len(some) - MOST_FINE
        if left > 0:
            text = f"So it is with {left:,} more {'field' if left == 1 else 'fields'}."
            kept.append(PageFinding("fine", name, some[0].title, text, "fields"))
    return kept


def by_level(findings: Sequence[PageFinding]) -> list[PageFinding]:
    """Return findings with problems first, fine ones last."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _worst_section(
    sections: Sequence[tuple[str, int, float]], maximum: float
) -> tuple[str, int, float]:
    """Return the section with the largest share, or the whole where it is about as bad.

    Args:
        sections: Names, steps and shares, the whole first.
        maximum: A larger share is a finding.
    """
    whole, worst = sections[0], max(sections, key=lambda section: section[2])
    if worst[2] <= max(maximum, REPEATED_IN_SECTION):
        return whole  # Of few steps some are equal by chance.
    return whole if whole[2] > maximum and worst[2] <= 1.5 * whole[2] else worst


def _is_choice(facts: FieldFacts) -> bool:
    """The field is a discrete action: a number, or a 1 among zeros."""
    if facts.spread is not None and facts.spread.one_hot:
        return True
    return (
        facts.role == "action"
        and facts.num_components == 1
        and facts.kind != "f"
        and not facts.varies
    )


def _all_of(facts: FieldFacts) -> bool:
    """All steps of the buffer were measured for the spread of a field."""
    return facts.complete and facts.spread is not None and (facts.spread.rows == facts.rows)


def _rows_looked_at(fields: Sequence[FieldFacts]) -> str:
    """Say how many steps of some fields were looked at."""
    least = min(fields, key=lambda facts: facts.rows)
    most = max(fields, key=lambda facts: facts.rows)
    text = looked_at(most.rows, most.complete)
    if least.rows < most.rows:
        text += f", of {least.path} {least.rows:,}"
    return f"{text}."


def _sections_looked_at(
    sections: Sequence[tuple[str, int, float]], complete: bool, steps: Steps
) -> str:
    """Say how many pairs of steps were looked at, and by how many environments."""
    by_env = sum(name.startswith("environment") for name, _, _ in sections)
    return looked_at(sections[0][1], complete, by_env, steps.num_envs)


def _names(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + _and_more(len(paths) - 3)


def _and_more(count: int) -> str:
    """Say how many others there are, where there are any."""
    return f" and {count:,} more" if count > 0 else ""


def _share(share: float) -> str:
    percent = 100 * share
    if percent == 0 or percent >= 9.95:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else f"{percent:.2g} %"


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e4 <= abs(value) < 1e15:
        return f"{value:,.2f}"
    return f"{value:.4g}"

"""What stands out: findings about a buffer, each with a number and its consequence.

Each check is a function of numbers that were counted before. It returns a finding, a
fine one where nothing stands out, or None where the buffer has nothing to check.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmreplay.errors import CorruptError, ReplayError
from mmreplay.page.sample import FieldFacts, component_name

Level = Literal["problem", "look", "fine"]
logger = logging.getLogger(__name__)
LEVELS: tuple[Level, ...] = ("problem", "look", "fine")

MIN_ROWS = 32
"""Of fewer rows nothing is concluded about values that do not change."""
RARE_REWARDS = 0.01
REPEATED = 0.05
SATURATED, MOSTLY_SATURATED = 0.2, 0.6
ONE_ACTION = 0.9
DOMINATES = 0.5
UNKNOWN_NEXT = 0.01
BEHIND, MIN_BEHIND = 0.05, 64
UNTOUCHED = 0.95
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


def check_rewards(rewards: Sequence[FieldFacts]) -> PageFinding:
    """Check that rewards differ from 0 and from each other.

    Args:
        rewards: The fields of the reward; empty where there is none.
    """
    if not rewards:
        return PageFinding(
            "look", "rewards", "No reward field",
            "Returns cannot be computed. Assign the role with "
            'Schema(fields, roles={"reward": ...}).',
            "fields",
        )  # fmt: skip
    facts = rewards[0]
    count = sum(reward.moments.count for reward in rewards)
    if count == 0:
        return PageFinding(
            "problem", "rewards", "No finite reward",
            f"All {facts.size:,} rewards are NaN or infinite.", "rewards",
        )  # fmt: skip
    rows = facts.rows
    share = max(reward.nonzero for reward in rewards) / rows
    low = min(reward.moments.min for reward in rewards if reward.moments.count)
    high = max(reward.moments.max for reward in rewards if reward.moments.count)
    if share == 0:
        return PageFinding(
            "problem", "rewards", "Every reward is 0",
            f"None of {rows:,} rewards differs from 0. Nothing can be learned from "
            "them.",
            "rewards",
        )  # fmt: skip
    if low == high:
        left_out = any(reward.moments.nonfinite for reward in rewards)
        return PageFinding(
            "look", "rewards", "Every reward is the same",
            f"All {'finite ones ' if left_out else ''}are {_number(low)}. A return "
            "then only says how long the episode is.",
            "rewards",
        )  # fmt: skip
    if share < RARE_REWARDS:
        return PageFinding(
            "look", "rewards", "Rewards are rare",
            f"{_share(share)} of steps have a reward other than 0.", "rewards",
        )  # fmt: skip
    return PageFinding(
        "fine", "rewards", "Rewards vary",
        f"{_share(share)} of steps have a reward other than 0. They lie between "
        f"{_number(low)} and {_number(high)}.",
        "rewards",
    )  # fmt: skip


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
    if found or not fields:
        return found
    text = "No NaN and no infinity in what was looked at."
    return [PageFinding("fine", "not finite", "All values are finite", text, "fields")]


def check_constant(facts: FieldFacts) -> PageFinding | None:
    """Check that no component of an observation or action has one value only."""
    if facts.rows < MIN_ROWS or facts.role not in ("observation", "action"):
        return None
    constant = len(facts.constant)
    to = f"field:{facts.path}"
    if facts.image is not None:
        if constant < facts.num_components:
            return None
        return PageFinding(
            "problem", "never changes", f"Never changes: {facts.path}",
            f"All {facts.rows:,} frames looked at are equal.", to,
        )  # fmt: skip
    if facts.num_values == 1 or not constant:
        # One discrete action is a finding of its own.
        return None
    name = component_name(facts.path, int(facts.constant[0]), facts.shape)
    more = f" and {constant - 1:,} more" if constant > 1 else ""
    finite = "finite " if facts.moments.nonfinite else ""
    components = "components has" if constant == 1 else "components have"
    return PageFinding(
        "look", "never changes", f"Never changes: {name}{more}",
        f"{constant:,} of {facts.num_components:,} {components} one {finite}value in "
        f"all {facts.rows:,} rows looked at ({name} is "
        f"{_number(facts.constant_value)}). A network learns nothing from it.",
        to,
    )  # fmt: skip


def check_changes(fields: Sequence[FieldFacts]) -> list[PageFinding]:
    """Check observations and actions with `check_constant`."""
    checked = [
        facts
        for facts in fields
        if facts.role in ("observation", "action") and facts.rows >= MIN_ROWS
        if not facts.varies
    ]
    found = [finding for facts in checked if (finding := check_constant(facts))]
    frames = [facts for facts in checked if facts.image is not None]
    values = [facts for facts in checked if facts.image is None]
    if found or not checked or any(len(facts.constant) for facts in values):
        return found
    if not values:
        title, text = "Frames differ", "Not all of them are equal."
    else:
        title = "All components change"
        text = "Each component of observations and actions has more than one value."
        if frames:
            text += " Of images, not all frames are equal."
    return [PageFinding("fine", "never changes", title, text, "fields")]


def check_repeats(facts: FieldFacts) -> PageFinding | None:
    """Check that the frames of an image field differ from the frame before."""
    if facts.image is None or facts.role != "observation" or facts.pairs < MIN_ROWS:
        return None
    if len(facts.constant) == facts.num_components:
        return None  # said by `check_constant`
    share, to = facts.repeats / facts.pairs, f"field:{facts.path}"
    if share > REPEATED:
        return PageFinding(
            "look", "repeated frames", f"Repeated frames: {facts.path}",
            f"{_share(share)} of frames equal the frame before. Either a frame is "
            "stored twice, or the environment stands still.",
            to,
        )  # fmt: skip
    return PageFinding(
        "fine", "repeated frames", "Frames change",
        f"{_share(share)} of the frames of {facts.path} equal the frame before.", to,
    )  # fmt: skip


def check_saturated(facts: FieldFacts) -> PageFinding | None:
    """Check that continuous actions lie within their range, not at its limits."""
    if facts.role != "action" or not len(facts.at_limits) or facts.rows < MIN_ROWS:
        return None
    worst = int(facts.at_limits.argmax())
    share = float(facts.at_limits[worst])
    if share <= SATURATED:
        return PageFinding(
            "fine", "saturated", "Actions lie within their range",
            f"At most {_share(share)} of the values of a component of {facts.path} are "
            "its lowest or highest value.",
            "actions",
        )  # fmt: skip
    name = component_name(facts.path, worst, facts.shape)
    others = int((facts.at_limits > SATURATED).sum()) - 1
    more, whose = f" and {others:,} more" if others else "", "its values"
    if others:
        whose = f"the values of {name}"
    level: Level = "problem" if share > MOSTLY_SATURATED else "look"
    return PageFinding(
        level, "saturated", f"Saturated: {name}{more}",
        f"{_share(share)} of {whose} are {_number(facts.lows[worst])} or "
        f"{_number(facts.highs[worst])}, the lowest and highest. The policy asks for "
        "more than the range allows.",
        "actions",
    )  # fmt: skip


def check_one_action(facts: FieldFacts) -> PageFinding | None:
    """Check that a discrete action is not nearly always the same."""
    if facts.role != "action" or not facts.num_values or facts.rows < MIN_ROWS:
        return None
    top = f"{facts.top_value:g}"
    if facts.top_share > ONE_ACTION:
        return PageFinding(
            "problem", "one action", f"Nearly always one action: {top}",
            f"{_share(facts.top_share)} of steps have it. Other actions are hardly "
            "tried.",
            "actions",
        )  # fmt: skip
    return PageFinding(
        "fine", "one action", "Actions vary",
        f"{facts.num_values:,} different ones. The most frequent, {top}, is in "
        f"{_share(facts.top_share)} of steps.",
        "actions",
    )  # fmt: skip


def check_ends(ends: Mapping[str, int]) -> PageFinding:
    """Check how episodes end.

    Args:
        ends: Episodes by kind: ``"terminated"``, ``"truncated"``, ``"both"`` and
            ``"broken off"``.
    """
    terminated, truncated = ends["terminated"] + ends["both"], ends["truncated"]
    broken = ends["broken off"]
    total = terminated + truncated + broken
    if total == 0:
        return PageFinding(
            "look", "ends", "No episode has ended yet",
            "Returns and lengths are known once one has.", "ends",
        )  # fmt: skip
    if truncated == total:
        return PageFinding(
            "look", "ends", "Every episode ends by truncation",
            f"All {total:,}. A time limit ends them, and no goal or failure: targets "
            "must bootstrap at the end.",
            "ends",
        )  # fmt: skip
    title, why = "Episodes end as the environment says", ""
    if broken:
        title = f"{broken:,} of {total:,} episodes were broken off"
        why = ": a writer stopped within them"
    return PageFinding(
        "fine", "ends", title,
        f"{terminated:,} terminated, {truncated:,} truncated, {broken:,} broken off"
        f"{why}.",
        "ends",
    )  # fmt: skip


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
            "look", "dominates", "One episode dominates",
            f"It has {longest:,} of {steps:,} steps ({_share(share)}). Batches are "
            "mostly from it.",
            "lengths",
        )  # fmt: skip
    return PageFinding(
        "fine", "dominates", "No episode dominates",
        f"The longest has {_share(share)} of all steps.", "lengths",
    )  # fmt: skip


def check_unknown_next(num_unknown: int, steps: int) -> PageFinding | None:
    """Check that the next observations of nearly all steps are known.

    Args:
        num_unknown: Steps whose next observation is not stored.
        steps: All steps.
    """
    if not steps or num_unknown <= UNKNOWN_NEXT * steps:
        return None
    return PageFinding(
        "look", "next unknown", "Steps whose next observation is unknown",
        f"{num_unknown:,} of {steps:,} steps ({_share(num_unknown / steps)}): single "
        "draws leave them out. Pass final_observation= to add where an episode is "
        "truncated, or draw with the transform WithoutNext.",
        "storage",
    )  # fmt: skip


def check_heap(heap: Mapping[str, Any] | None, capacity: int) -> PageFinding | None:
    """Check that the heap has the bytes for half of the rows at least.

    Args:
        heap: See `heap_facts`; None where no field varies.
        capacity: Rows of each environment.
    """
    if heap is None or heap["rows_that_fit"] is None:
        return None
    fit = heap["rows_that_fit"]
    if 2 * fit >= capacity:
        return None
    return PageFinding(
        "look", "heap", "The heap is too small for half of the rows",
        f"The values of about {fit:,} of {capacity:,} rows fit into it: older rows are "
        "dropped for want of space. Pass more heap_bytes to resize.",
        "storage",
    )  # fmt: skip


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
            "look", "behind", title,
            f"Environment {last} has {lag:,} rows less than environment {furthest}, "
            f"the furthest, which has {highest:,}; {rest}",
            "storage",
        )  # fmt: skip
    return PageFinding(
        "fine", "behind", "Environments are in step",
        f"They differ by {lag:,} {'row' if lag == 1 else 'rows'} at most.", "storage",
    )  # fmt: skip


def check_reset_rows(clause: str | None) -> PageFinding | None:
    """Report rows after episode ends that look like resets.

    Args:
        clause: What `mmreplay.episodes.rules.find_reset_rows` found.
    """
    if clause is None:
        return None
    return PageFinding(
        "problem", "reset rows", "Reset rows are stored as steps",
        f"{clause[0].upper()}{clause[1:]}. Such rows are no steps of the "
        'environment: create the buffer with autoreset="next_step".',
        "episodes",
    )  # fmt: skip


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
            "look", "priorities", "Priorities are hardly updated",
            f"{_share(common_share)} of rows have the priority that new rows enter at. "
            "Call update_priorities after each batch.",
            "priorities",
        )  # fmt: skip
    spread = (
        f"The top 1 % of rows have {_share(top_share)} of the mass at alpha {alpha:g}. "
        f"Draws are worth {_share(effective)} of the rows."
    )
    if top_share > TOP_SHARE or effective < FEW_EFFECTIVE:
        title = "Few rows take most draws"
        return PageFinding("look", "priorities", title, spread, "priorities")
    return PageFinding(
        "fine", "priorities", "Priorities are spread", spread, "priorities"
    )


def by_level(findings: Sequence[PageFinding]) -> list[PageFinding]:
    """Return findings with problems first, fine ones last."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _share(share: float) -> str:
    percent = 100 * share
    if percent == 0 or percent >= 9.95:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else f"{percent:.2g} %"


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"

"""Compares the arguments that ranks share, before they begin what one of them alone would not end.

All ranks raise if one of them refuses its own arguments, or if theirs differ. If nothing is wrong, that is one
reduction of three integers for each group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from mcore_bridge.errors import BridgeError, CheckpointError, describe, grouped_by_rank, shown
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

T = TypeVar("T")
Shared = Mapping[str, object]
"""Arguments by name that must be equal on all ranks, by their ``repr``."""


@dataclass(frozen=True)
class Content:
    """A value that ranks compare by its content, and that a message shows by its name, such as that of a folder.

    Attributes:
        name: what a message shows; it may differ between ranks.
        digest: what is compared.
    """

    name: str
    digest: str

    def __repr__(self) -> str:
        return f"{self.name} (content {self.digest[:12]})"


def digest_of(*texts: str | bytes) -> str:
    """A digest of some texts, as hexadecimal digits. It is the same in every process."""
    whole = hashlib.sha256()
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()


def replica_groups(groups: ProcessGroupCollection) -> list[Group]:
    """Groups that together reach all ranks of a model replica: tensor, context and pipeline ranks."""
    return [Group(group) for group in (groups.tp, groups.cp, groups.pp) if group.size() > 1]


def agreed(groups: Sequence[Group], check: Callable[[], tuple[T, Shared]], kind: type[BridgeError]) -> T:
    """Run ``check`` on all ranks of the groups, and compare what it says of the arguments.

    Args:
        groups: one after the other, they reach all ranks that compare.
        check: checks the arguments. Returns what is made of them, and those that must be alike.
        kind: the error for ranks whose own ``check`` has not raised.

    Raises:
        BridgeError: on all ranks, if ``check`` raises on one, or what it says differs.
    """
    problem: Exception | None = None
    result, shared = None, {}
    try:
        result, shared = check()
    except Exception as error:  # any, even out of memory: other ranks must hear of it
        problem = error
    if (problem := problem_of_ranks(groups, problem, shared, kind)) is not None:
        raise problem
    return result  # type: ignore[return-value]  # check has returned it


def problem_of_ranks(
    groups: Sequence[Group],
    problem: Exception | None,
    shared: Shared,
    kind: type[BridgeError],
    advice: str = "pass one value",
) -> Exception | None:
    """The error that this rank should raise, as all others: its own, that of another rank, or that arguments differ.

    Args:
        groups, kind: as for ``agreed``.
        problem: what is wrong with the arguments of this rank.
        shared: those that must be alike. A rank with a problem may have none.
        advice: what to do if they differ.
    """
    keys = {name: value.digest if isinstance(value, Content) else repr(value) for name, value in shared.items()}
    number = int(digest_of(*keys, *keys.values())[:15], 16)
    numbers = [problem is not None, number, -number]
    for group in groups:
        numbers = group.most(numbers)
    if not numbers[0] and numbers[1] == -numbers[2]:
        return None
    own = (dist.get_rank(), "" if problem is None else describe(problem), keys, _texts(shared))
    answers = [own]
    for group in groups if not any(group.is_fake for group in groups) else ():
        answers = [answer for part in group.all_gather_object(answers) for answer in part]
    if problem is not None:
        return problem
    by_rank: list[tuple[int, Any]] = sorted({rank: rest for rank, *rest in answers}.items())
    ranks = [rank for rank, _ in by_rank]
    if failures := grouped_by_rank([text for _, (text, *_) in by_rank], ranks):
        return kind(f"expected arguments that every rank takes, found one that refuses its own, {failures}")
    known, texts = ([answer[place] for _, answer in by_rank] for place in (1, 2))
    names = dict.fromkeys(name for of_rank in known for name in of_rank)
    differ = [name for name in names if len({of_rank.get(name) for of_rank in known}) > 1]
    passed = grouped_by_rank([", ".join(f"{name}={own.get(name)}" for name in differ) for own in texts], ranks)
    return kind(f"expected the same {' and '.join(differ)} on every rank, found {passed}; {advice}")


def require_alike(group: Group, shared: Shared, kind: type[BridgeError] = CheckpointError) -> None:
    """Raise ``kind`` on all ranks of a group if arguments of one call differ between ranks."""
    agreed([group], lambda: (None, shared), kind)


def _texts(shared: Shared) -> dict[str, str]:
    return {name: repr(value) if isinstance(value, Content) else shown(value) for name, value in shared.items()}

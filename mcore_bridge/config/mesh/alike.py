"""Compares the arguments of ranks before they begin a common operation, in which they would wait for each other.

All ranks raise if one rank refuses its arguments, or if arguments differ. If nothing is wrong, this takes one reduction
of three integers for each group.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks
from mcore_bridge.errors import BridgeError, describe, grouped_by_rank, shown

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

T = TypeVar("T")
Shared = Mapping[str, object]
"""Arguments by name that must be equal on all ranks, by their ``repr``."""
_NONE: Shared = MappingProxyType({})
_NO_ADVICE: Mapping[str, str] = MappingProxyType({})
_ADVICE = {"adapters": "call add_adapters and set_adapters alike on every rank"}


@dataclass(frozen=True)
class Content:
    """A value that ranks compare by its content, and that messages show by its name, such as a folder.

    Attributes:
        name: the text in messages; it may differ between ranks.
        digest: the digest of the content, which is compared.
    """

    name: str
    digest: str

    def __repr__(self) -> str:
        return f"{self.name} (content {self.digest[:12]})"


class _Repr(str):
    """The ``repr`` of a value that may be impossible to send to other ranks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def sendable(shared: Shared) -> dict[str, object]:
    """Arguments in a form that can be sent to other ranks; a function, for example, cannot be sent."""
    return {name: value if isinstance(value, Content) else _Repr(repr(value)) for name, value in shared.items()}


def digest_of(*texts: str | bytes) -> str:
    """A digest of some texts, as hexadecimal digits. It is equal in every process."""
    whole = hashlib.sha256()
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()


def replica_groups(groups: ProcessGroupCollection) -> list[dist.ProcessGroup]:
    """Groups that, one after the other, reach all ranks of a model replica: tensor, context and pipeline ranks."""
    return [groups.tp, groups.cp, groups.pp]


def agreed(groups: Sequence[dist.ProcessGroup], check: Callable[[], tuple[T, Shared]], kind: type[BridgeError]) -> T:
    """Run ``check`` on all ranks of the groups, and compare the values that it returns.

    Args:
        groups: one after the other, they reach all ranks that compare.
        check: checks the arguments. Returns a result, and the values that must be equal on all ranks.
        kind: the error for ranks whose own ``check`` has not raised.

    Raises:
        BridgeError: on all ranks, if ``check`` raises on one rank, or if the values differ.
    """
    problem: Exception | None = None
    result, shared = None, _NONE
    try:
        result, shared = check()
    except Exception as error:  # any error, even out of memory: other ranks must be informed
        problem = error
    if (problem := problem_of_ranks(groups, problem, shared, kind)) is not None:
        raise problem
    return result  # type: ignore[return-value]  # check has returned it


def problem_of_ranks(
    groups: Sequence[dist.ProcessGroup],
    problem: Exception | None,
    shared: Shared,
    kind: type[BridgeError],
    advice: Mapping[str, str] = _NO_ADVICE,
) -> Exception | None:
    """The error that all ranks should raise: of this rank, of another rank, or because arguments differ.

    Args:
        groups, kind: as for ``agreed``.
        problem: the fault of this rank's arguments.
        shared: the values that must be equal on all ranks. A rank with a problem may have none.
        advice: for some names what to do if the values differ. For other names it is to pass one value.
    """
    shared = sendable(shared)
    keys = {name: _key(value) for name, value in shared.items()}
    number = int(digest_of(*keys, *keys.values())[:15], 16)
    numbers = [problem is not None, number, -number]
    groups = [group for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]
    for group in groups:
        numbers = _largest(numbers, group)
    if not numbers[0] and numbers[1] == -numbers[2]:
        return None
    answers: list[Any] = [(dist.get_rank() if groups else 0, "" if problem is None else describe(problem), shared)]
    for group in groups:
        answers = [answer for part in _gathered(answers, group) for answer in part]
    if problem is not None:
        return problem
    answers.sort(key=itemgetter(0))
    ranks, problems, given = ([answer[place] for answer in answers] for place in range(3))
    if failures := grouped_by_rank(problems, ranks):
        return kind(f"expected arguments that every rank accepts, found a rank that refuses its own, {failures}")
    return difference(given, kind, ranks, advice)


def difference(
    shared: Sequence[Shared],
    kind: type[BridgeError],
    ranks: Sequence[int] | None = None,
    advice: Mapping[str, str] = _NO_ADVICE,
) -> BridgeError | None:
    """The error for arguments that differ, with the value of each rank; None if none differ.

    Args:
        shared: the values of each rank.
        kind: the error.
        ranks: the numbers of these ranks in the job. None: they are numbered in the group.
        advice: for some names what to do if the values differ. For other names it is to pass one value.
    """
    names = dict.fromkeys(name for own in shared for name in own)
    differ = [name for name in names if len({_key(own.get(name)) for own in shared}) > 1]
    passed = [", ".join(f"{name}={_text(own.get(name))}" for name in differ) for own in shared]
    if not differ:
        return None
    return kind(
        f"expected the same {' and '.join(differ)} on every rank, found {grouped_by_rank(passed, ranks)}; "
        + "; ".join(dict.fromkeys({**_ADVICE, **advice}.get(name, "pass one value") for name in differ))
    )


def _key(value: object) -> str:
    """The text of a value for the comparison, without addresses of objects, which differ between processes."""
    return value.digest if isinstance(value, Content) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@naming_lost_ranks("comparing arguments with other ranks")
def _largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The maximum over a group of each number."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend(group)) else "cpu"
    reduced = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
    return [int(number) for number in reduced.tolist()]


@naming_lost_ranks("comparing arguments with other ranks")
def _gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _text(value: object) -> str:
    return repr(value) if isinstance(value, Content) else shown(value)

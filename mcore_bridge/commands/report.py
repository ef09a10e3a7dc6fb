"""The report of ``verify`` as a table, and its progress bar."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.launch.processes import OnEvent
from mcore_bridge.rules.dtypes import dtype_name

if TYPE_CHECKING:
    from mcore_bridge.commands.verify.verify import Verdict


@contextmanager
def progress(console: Console, num_ranks: int) -> Iterator[OnEvent]:
    """A progress bar for each phase, over all ranks, with the time that is left. The bars disappear at the end."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    phases: dict[str, TaskID] = {}
    parts: dict[str, dict[int, float]] = {}

    def on_event(rank: int, phase: str, done: int, total: int) -> None:
        if phase not in phases:
            phases[phase] = bar.add_task(phase, total=num_ranks)
        parts.setdefault(phase, {})[rank] = done / max(total, 1)
        bar.update(phases[phase], completed=sum(parts[phase].values()))

    with bar:
        bar.add_task("processes", total=None)
        yield on_event


def render(verdict: Verdict) -> Table:
    """The report of ``verify``, as a table."""
    task, exported = verdict.task, verdict.exported
    dtypes = Counter(dtype_name(spec.dtype) for spec in exported)
    kinds = " and ".join(name for name, _ in dtypes.most_common())
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", f"{verdict.folder}: {_kind(verdict)}, {text.count(verdict.parameters)} parameters")
    of_files = f"{text.num_bytes(verdict.bytes)} of {kinds} in {text.plural(len(exported), 'tensor')}"
    of_files += "".join(f", {count} of them decoded from {codec}" for codec, count in verdict.decoded.items())
    table.add_row("checkpoint", escape(of_files))
    for note in verdict.notes:
        table.add_row("config", note)
    for row, names in (("not built", verdict.not_built), ("not used", verdict.unused)):
        if names:
            table.add_row(row, f"{text.plural(len(names), 'tensor')} of the files: {text.names(names)}")
    if verdict.drawn:
        drawn = text.plural(len(verdict.drawn), "tensor")
        table.add_row("drawn", f"{drawn} that the files lack, of MTP layers: {text.names(verdict.drawn)}")
    num_layers = verdict.blueprint.config.num_layers
    table.add_row("mesh", verdict.mesh.describe(world_size=verdict.ranks, num_layers=num_layers))
    held = text.num_bytes(verdict.rank_bytes)
    table.add_row("built", f"{verdict.blueprint}; at most {held} of parameters on a rank")
    table.add_row("seconds", ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in verdict.seconds.items()))
    where = f"on {'all ' * (verdict.ranks > 1)}{text.plural(verdict.ranks, 'rank')}"
    where += f", as in {task.against}" * (task.against != task.folder)
    table.add_row("exact", _exact(verdict.tensors, verdict.different, where))
    if verdict.encoded_left_out is not None:
        table.add_row("published", escape(f"left out: {verdict.encoded_left_out}"))
    elif verdict.encoded_different is not None:
        table.add_row("published", _published(verdict.encoded, verdict.encoded_different))
    if verdict.widened:
        kept = text.plural(len(verdict.widened), "tensor")
        leave = f"{kept} in fp32 in the model leave as the files have them: {text.names(verdict.widened)}"
        table.add_row("dtypes", leave)
    if verdict.saved_different is not None:
        table.add_row("saved", _exact(verdict.tensors, verdict.saved_different, f"in {task.save}"))
    if verdict.adapter_different is not None:
        exact = _exact(verdict.num_adapters, verdict.adapter_different, f"as in {task.adapter}")
        table.add_row("adapter", exact)
    table.add_row("logits", _logits(verdict))
    return table


def _kind(verdict: Verdict) -> str:
    """The ``model_type`` of the checkpoint, and of its text if it is a composite without a tower."""
    provenance = verdict.blueprint.provenance
    kind: str = provenance.config.model_type
    if provenance.whole is None or provenance.tower:
        return kind
    return f"the text ({provenance.hf.model_type}) of a {kind}"


def _exact(num_tensors: int, different: tuple[str, ...], where: str) -> str:
    if not different:
        return f"[green]yes[/]: {text.plural(num_tensors, 'tensor')} bit by bit, {where}"
    number, names = text.plural(len(different), "tensor"), text.names(different)
    return f"[red]NO[/]: {number} of {num_tensors:,} differ {where}: {names}"


def _published(num_encoded: int, different: tuple[str, ...]) -> str:
    encoded = text.plural(num_encoded, "encoded tensor")
    if not different:
        return f'[green]yes[/]: {encoded} bit by bit with quantize="as_published", and all others'
    number, names = text.plural(len(different), "tensor"), text.names(different)
    return f'[red]NO[/]: {number} differ with quantize="as_published", of which {encoded} are in the files: {names}'


def _logits(verdict: Verdict) -> str:
    comparison = verdict.logits
    if comparison is None:
        return f"left out: {verdict.logits_left_out}"
    reference = "peft" if verdict.task.adapter else "transformers"
    said = (
        f"largest difference to {reference} in fp32 {comparison.difference:.1e}, relative {comparison.relative:.1e} "
        f"(at most {comparison.tolerance:.0e}) over {comparison.count:,} logits up to {comparison.scale:.3g}"
    )
    if math.isnan(comparison.difference):
        said += "; some are NaN, as if a weight had numbers that are not finite"
    if comparison.images:
        said += f", with {text.plural(comparison.images, 'image')}"
    elif comparison.missing:
        said += f", {comparison.missing}"
    if comparison.varied:
        number = text.plural(len(comparison.varied), "tensor")
        said += f"; both sides changed {number} with constant or repeated values: {text.names(comparison.varied)}"
    if comparison.untold:
        number = text.plural(len(comparison.untold), "encoded tensor")
        said += f"; {number} with constant or repeated values stayed unchanged: {text.names(comparison.untold)}"
    return f"[green]{said}[/]" if comparison.agree() else f"[red]WRONG[/]: {said}"

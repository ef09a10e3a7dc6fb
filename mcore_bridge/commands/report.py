"""The report of ``verify`` as a table, and the progress bar while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mcore_bridge.architecture import architecture_of
from mcore_bridge.commands import text
from mcore_bridge.commands.verify.verify import TOLERANCE, Verdict, held_specs
from mcore_bridge.config.unread_fields import notes_on, unread_fields
from mcore_bridge.convert.conversion import ModelConversion
from mcore_bridge.launch.processes import OnEvent

if TYPE_CHECKING:
    from mcore_bridge.commands.draw import Drawn
    from mcore_bridge.convert.convert import Converted

_SHOWN = 5  # names of tensors that differ


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
    numbers, size = held_specs(verdict)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", f"{verdict.task.folder}: {_kind(verdict)}, {numbers}")
    table.add_row("checkpoint", size)
    for _, note in notes_on(verdict.blueprint.unread):
        table.add_row("config", note)
    for row, names in (("carried", verdict.carried), ("not used", verdict.ignored)):
        if names:
            table.add_row(row, f"{text.plural(len(names), 'tensor')} of the files: {_names(names)}")
    if verdict.initialised:
        drawn = text.plural(len(verdict.initialised), "tensor")
        table.add_row("drawn", f"{drawn} that the files lack, of MTP layers: {_names(verdict.initialised)}")
    table.add_row("mesh", _mesh(verdict))
    largest = max(finding.held for finding in verdict.findings)
    table.add_row("built", f"{verdict.blueprint}; at most {text.num_bytes(largest)} of parameters on a rank")
    table.add_row("seconds", _seconds(verdict))
    table.add_row("exact", _exact(len(verdict.expected), verdict.different, f"on all {len(verdict.findings)} ranks"))
    if verdict.widened:
        kept = text.plural(len(verdict.widened), "tensor")
        table.add_row("dtypes", f"{kept} in fp32 in the model leave as the files have them: {_names(verdict.widened)}")
    if verdict.task.save is not None:
        saved = _exact(len(verdict.expected), verdict.saved_different, f"in {verdict.task.save}")
        table.add_row("saved", saved)
    if adapters := verdict.findings[0].adapters:
        exact = _exact(len(adapters), verdict.adapters_different, f"as in {verdict.task.adapter}")
        table.add_row("adapter", exact)
    table.add_row("logits", _logits(verdict))
    return table


def render_conversion(converted: Converted, target: Path) -> str:
    """The report of ``convert``, as a line."""
    conversion = converted.conversion
    kept = f", {converted.num_kept} of them by an earlier run" if converted.num_kept else ""
    ignored = text.plural(len(conversion.ignored), "tensor")
    unused = f" Not used are {ignored} of the source: {_names(conversion.ignored)}." if conversion.ignored else ""
    notes = [f" {conversion.note}."] if conversion.note else []
    if isinstance(conversion, ModelConversion):
        hf_config = conversion.model.provenance.hf
        notes += [f" {note}." for _, note in notes_on(unread_fields(hf_config, architecture_of(hf_config).fields))]
    return (
        f"{target} is written as {conversion.kind}: {text.plural(*conversion.size_text)}, "
        f"{text.num_bytes(sum(conversion.sizes))} in {text.plural(len(conversion.names), 'file')}{kept}.{unused}"
        + "".join(notes)
    )


def render_drawn(drawn: Drawn) -> str:
    """The report of ``draw``, as a line."""
    return (
        f"{drawn.target} is drawn: {text.count(drawn.num_parameters)} parameters in "
        f"{text.plural(drawn.num_tensors, 'tensor')}, {text.num_bytes(drawn.num_bytes)}"
    )


def _kind(verdict: Verdict) -> str:
    """The ``model_type``, and that of the text where a composite is around it."""
    provenance = verdict.blueprint.provenance
    kind: str = provenance.config.model_type
    if provenance.whole is None or provenance.tower:
        return kind
    return f"the text ({provenance.hf.model_type}) of a {kind}"


def _mesh(verdict: Verdict) -> str:
    config = verdict.blueprint.config
    return verdict.task.options.dims.describe(world_size=len(verdict.findings), num_layers=config.num_layers)


def _seconds(verdict: Verdict) -> str:
    phases = verdict.findings[0].seconds
    return ", ".join(f"{phase} {max(f.seconds[phase] for f in verdict.findings):.2f}" for phase in phases)


def _exact(num_tensors: int, different: tuple[str, ...], where: str) -> str:
    if not different:
        return f"[green]yes[/]: {text.plural(num_tensors, 'tensor')} bit by bit, {where}"
    return f"[red]NO[/]: {text.plural(len(different), 'tensor')} of {num_tensors:,} differ {where}: {_names(different)}"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _logits(verdict: Verdict) -> str:
    comparison = verdict.findings[0].logits
    if comparison is None:
        return (verdict.findings[0].skipped and f"left out: {verdict.findings[0].skipped}") or "left out, as asked"
    reference = "peft" if verdict.task.adapter else "transformers"
    said = (
        f"largest difference to {reference} in fp32 {comparison.difference:.1e}, relative {comparison.relative:.1e} "
        f"(at most {TOLERANCE:.0e}) over {comparison.num_logits:,} logits up to {comparison.scale:.3g}"
    )
    if comparison.num_images:
        said += f", with {text.plural(comparison.num_images, 'image')}"
    elif comparison.missing:
        said += f", {comparison.missing}"
    if comparison.varied:
        number = text.plural(len(comparison.varied), "tensor")
        said += f"; {number} that are flat or equal had random changes in both: {_names(comparison.varied)}"
    if comparison.untold:
        number = text.plural(len(comparison.untold), "encoded tensor")
        said += f"; not told apart are {number} that are equal: {_names(comparison.untold)}"
    return f"[green]{said}[/]" if verdict.logits_agree else f"[red]WRONG[/]: {said}"

"""The answer of ``convert`` and ``merge``: the folder that they wrote, with its contents, and a report of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mcore_bridge.architecture import architecture_of
from mcore_bridge.commands import text
from mcore_bridge.config.unread_fields import notes_on, unread_fields
from mcore_bridge.convert.conversion import ModelConversion
from mcore_bridge.convert.convert import Converted


@dataclass(frozen=True, slots=True)
class Written:
    """A folder that a command has written, and its contents.

    Attributes:
        target: the folder.
        kind: its format.
        parameters: the number of parameters, which are the elements of all tensors.
        tensors: the number of tensors; in a checkpoint of megatron-core, of its parameters.
        bytes: the bytes of all tensors.
        files: names in the target.
        kept: how many of the files an earlier run had written.
        copied: HF names in the target of parts that are not built, and were copied.
        unused: HF names of the source that nothing uses.
        notes: remarks on the target for the user.
    """

    target: Path
    kind: str
    parameters: int
    tensors: int
    bytes: int
    files: tuple[str, ...]
    kept: int
    copied: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, converted: Converted, target: Path) -> Written:
        """The answer of a conversion to ``target``."""
        conversion = converted.conversion
        notes = [conversion.note] if conversion.note else []
        if isinstance(conversion, ModelConversion):
            hf_config = conversion.model.provenance.hf
            notes += [note for _, note in notes_on(unread_fields(hf_config, architecture_of(hf_config).fields))]
        numels = conversion.numels
        return cls(
            target=target,
            kind=conversion.kind,
            parameters=sum(numels),
            tensors=len(numels),
            bytes=sum(conversion.sizes),
            files=tuple(conversion.names),
            kept=converted.num_kept,
            copied=conversion.copied_names,
            unused=conversion.ignored,
            notes=tuple(notes),
        )


def render(written: Written) -> str:
    """The report, as a line."""
    kept = f", {written.kept} of them by an earlier run" if written.kept else ""
    ignored = text.plural(len(written.unused), "tensor")
    unused = f" Not used are {ignored} of the source: {text.names(written.unused)}." if written.unused else ""
    return (
        f"{written.target} is written as {written.kind}: {text.count(written.parameters)} parameters in "
        f"{text.plural(written.tensors, 'tensor')}, {text.num_bytes(written.bytes)} in "
        f"{text.plural(len(written.files), 'file')}{kept}.{unused}" + "".join(f" {note}." for note in written.notes)
    )

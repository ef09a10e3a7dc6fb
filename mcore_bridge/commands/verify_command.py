"""The command ``verify``: checks a checkpoint on a mesh of processes, or compares the files of two folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcore_bridge.commands.options import (
    DTYPE,
    Cp,
    Debug,
    Download,
    Ep,
    Etp,
    Folder,
    Json,
    Layout,
    Model,
    Mtp,
    Pp,
    Sp,
    Strict,
    Tp,
    UsageError,
    Vp,
    build_options,
    dtype_of,
    path,
)
from mcore_bridge.commands.run_command import Answer, options_of, refuse, running


def verify_command(
    context: typer.Context,
    folder: Folder,
    tp: Tp = 1,
    pp: Pp = 1,
    vp: Vp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    sp: Sp = False,
    layout: Layout = None,
    mtp: Mtp = 0,
    device: Annotated[str, typer.Option(help='"cpu" (gloo), or "cuda" (nccl, one GPU for each rank).')] = "cpu",
    backend: Annotated[str, typer.Option(help='"te", "torch", or "auto": te where it is installed, on cuda.')] = "auto",
    model: Model = "gpt",
    dtype: Annotated[
        str | None, typer.Option(help=DTYPE.format("Of the model and the export", "as in the files"))
    ] = None,
    against: Annotated[
        Path | None, typer.Option(parser=path, help="Compare the export with this folder, or name on the hub, instead.")
    ] = None,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Compare the files of the folder with --against, and build no model.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(parser=path, help="Also save to this folder, and compare that too.")
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="PEFT folder, or its hub name: add its adapters, and compare their export, and logits with peft.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequences that logits are computed for.")] = 32,
    no_logits: Annotated[bool, typer.Option("--no-logits", help="Do not compare logits with transformers.")] = False,
    strict_config: Strict = False,
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a checkpoint onto a mesh of processes, export it, and compare.

    Exact means: the export has exactly the tensors of the files, with the same bits (cast first with --dtype).

    The export of a quantized folder is also made in its format, with quantize="as_published", and must have its codes
    and scales. If the mesh cuts codes that lie in one byte or word, this is left out, with a message.

    Logits are compared as well. The same weights are loaded once more in fp32. A small random batch goes through
    megatron-core's pipeline schedule, and its logits must equal those of transformers up to 1e-3 of the largest one.
    That is far above fp32 rounding (1e-5), and far below the effect of any misplaced tensor (1e-2). This is left out,
    with a message, if the model in fp32 does not fit into memory.

    With --against and --files-only the files of two folders are compared, and no model is built.

    The exit code is 1 if anything differs.
    """
    with running(context) as answer:
        from mcore_bridge.commands.hub import ADAPTER, MODEL, locate
        from mcore_bridge.commands.report import progress, render

        if files_only:
            _compare_files(context, answer, folder, against)
            return
        from mcore_bridge.commands.verify.verify import verify

        refuse(context, {"tokens"} if no_logits else (), "with --no-logits")
        options, wanted = build_options(context), dtype_of(dtype)
        folder = locate(folder, MODEL, download=download)
        against = against and locate(against, MODEL, download=download)
        adapter = adapter and locate(adapter, ADAPTER, download=download)
        with progress(Console(stderr=True), options.dims.smallest_world) as on_event:
            verdict = verify(
                folder,
                options,
                dtype=wanted,
                against=against,
                num_tokens=0 if no_logits else tokens,
                save=save,
                adapter=adapter,
                on_event=on_event,
            )
        answer(verdict, render)
        if not verdict.good:
            raise typer.Exit(1)


def _compare_files(context: typer.Context, answer: Answer, folder: Path, against: Path | None) -> None:
    from mcore_bridge.commands.hub import MODEL, locate
    from mcore_bridge.commands.report import progress
    from mcore_bridge.commands.verify.folders import compare_folders, render

    used = {"against", "files_only", "download", "json", "debug"}
    refuse(context, {*options_of(context)} - used, "with --files-only, which builds no model")
    if against is None:
        raise UsageError("--files-only compares two folders, found one: name the other one by --against")
    folder, against = (locate(name, MODEL, download=context.params["download"]) for name in (folder, against))
    with progress(Console(stderr=True), 1) as on_event:
        compared = compare_folders(folder, against, partial(on_event, 0))
    answer(compared, render)
    if not compared.good:
        raise typer.Exit(1)

"""The commands and their options, for typer. An error is one message on stderr, and exit code 1, or 2 for
wrong usage.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcore_bridge.commands.options import (
    DTYPE,
    VISIONS,
    Debug,
    Download,
    Ep,
    Etp,
    Json,
    Layout,
    Pp,
    Strict,
    Tp,
    Vp,
    dtype_of,
    mesh_of,
    of_command_line,
    one_of,
    path,
)
from mcore_bridge.commands.plan_command import plan_command
from mcore_bridge.commands.run_command import Commands, refuse, running, uncompiled
from mcore_bridge.commands.verify_command import verify_command

app = typer.Typer(
    name="mcore-bridge",
    cls=Commands,
    help="HuggingFace models as Megatron-Core GPTModels on any mesh, and their weights back, exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_BACKENDS = ("te", "torch")
_IGNORED: dict[str, tuple[set[str], str]] = {
    "torch_dist": ({"backend", "drop_mtp"}, "with --to torch_dist"),
    "torch": ({"drop_mtp"}, "with --to torch"),
    "hf": ({"hf", "mtp", "drop_mtp", "vision", "backend", "strict_config"}, "with --to hf, which builds no model"),
}
"""The options of which ``convert`` makes no use, by the format to make from an HF folder."""
_FROM_MEGATRON = "for a checkpoint of megatron-core, of which an HF folder is made"


def _version(wanted: bool) -> None:
    if wanted:
        from mcore_bridge import __version__  # it searches the installed packages

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""


app.command("verify")(verify_command)
app.command("plan")(plan_command)


@app.command("convert")
def convert_command(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            parser=path, help="HF folder, or its name on the hub; or a checkpoint of megatron-core.", show_default=False
        ),
    ],
    target: Annotated[
        Path, typer.Argument(parser=path, help="Folder of the other kind; it is written.", show_default=False)
    ],
    hf: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="Folder of the HF config and tokenizer, if SOURCE has none; or a name on the hub."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE.format("Of all tensors", "each keeps its own"))] = None,
    mtp: Annotated[int, typer.Option(min=0, help="Layers of multi-token prediction to take from an HF folder.")] = 0,
    drop_mtp: Annotated[
        bool,
        typer.Option("--drop-mtp", help="Do not copy MTP layers that a checkpoint lacks from the folder of --hf."),
    ] = False,
    vision: Annotated[
        str, typer.Option(help='"train" takes the model of images from an HF folder too, "text_only" its text alone.')
    ] = "text_only",
    to: Annotated[
        str,
        typer.Option(
            help='Format to make from an HF folder: "torch_dist"; "hf", plain weights of a quantized folder, or '
            'weights in the format of --quantize; or "torch". Files of "torch" are Megatron\'s older ones, as RLinf '
            "loads them, for the mesh of the options below."
        ),
    ] = "torch_dist",
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Encode the weights of an HF folder. FORMAT is a quantized folder of the model, or its hub name; "
            'or "as_published" for the folder of --hf. Or it is a quantization_config, as JSON or a file *.json.',
        ),
    ] = None,
    tp: Tp = 1,
    pp: Pp = 1,
    vp: Vp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    layout: Layout = None,
    backend: Annotated[
        str, typer.Option(help='Modules that load these files: "te" (TransformerEngine\'s) or "torch".')
    ] = "te",
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that write at the same time.")] = 1,
    gpus: Annotated[
        int,
        typer.Option(
            min=0, help="Number of processes with a GPU each, to assemble parameters; the bytes are the same."
        ),
    ] = 0,
    strict_config: Strict = False,
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert an HF folder to a checkpoint of megatron-core, or a checkpoint to an HF folder.

    A torch_dist folder loads at any mesh. From a training checkpoint only the model is read, not the optimizer. No GPU
    is needed, and each process needs memory for a few of the largest parameters. Run an interrupted conversion again,
    and it continues; the target appears when it is complete.
    """
    with running(context) as answer, uncompiled():
        from mcore_bridge.commands.hub import DESCRIPTION, MODEL, locate, quantize_of
        from mcore_bridge.commands.report import progress
        from mcore_bridge.commands.written import Written, render
        from mcore_bridge.convert.convert import convert, is_checkpoint
        from mcore_bridge.convert.hf_to_torch import rank_files

        one_of("to", to, tuple(_IGNORED))
        one_of("vision", vision, VISIONS)
        refuse(context, {"processes"} if gpus else (), "with --gpus, which starts a process for each GPU")
        dims, cast = mesh_of(context), dtype_of(dtype)
        with of_command_line():
            wanted = rank_files(to, dims, one_of("backend", backend, _BACKENDS))
        source = locate(source, MODEL, download=download)
        hf = hf and locate(hf, DESCRIPTION, download=download)
        from_megatron = is_checkpoint(source)
        if from_megatron:
            refuse(context, {"mtp", "vision", "backend"} | ({"to"} if to == "torch_dist" else set()), _FROM_MEGATRON)
        else:
            refuse(context, *_IGNORED[to])
        with progress(Console(stderr=True), gpus or processes) as on_event:
            converted = convert(
                source,
                target,
                hf=hf,
                dtype=cast,
                num_mtp_layers=mtp,
                vision=vision,
                mtp="dropped" if drop_mtp else "copied",
                rank_files=wanted,
                plain=to == "hf" and not from_megatron,
                quantize=quantize_of(quantize, download=download),
                num_processes=processes,
                num_gpus=gpus,
                strict_config=strict_config,
                on_event=on_event,
            )
        answer(Written.of(converted, target), render)


@app.command("merge")
def merge_command(
    context: typer.Context,
    base: Annotated[
        Path,
        typer.Argument(
            parser=path, help="HF folder that the adapter was trained on, or its name on the hub.", show_default=False
        ),
    ],
    adapter: Annotated[
        Path,
        typer.Argument(
            parser=path, help="Folder that peft or a trainer saved, or its name on the hub.", show_default=False
        ),
    ],
    target: Annotated[Path, typer.Argument(parser=path, help="HF folder; it is written.", show_default=False)],
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Encode the merged weights. FORMAT is a quantized folder of the base, or its hub name; or a "
            "quantization_config, as JSON or a file *.json.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that write at the same time.")] = 1,
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Merge the adapter of a PEFT folder into the weights of an HF folder.

    Sums are in fp64 and rounded once to the dtype of each weight. All other tensors and files are those of BASE. No GPU
    is needed, and a process holds a piece of a tensor at a time. Run an interrupted merge again, and it continues; the
    target appears when it is complete.
    """
    with running(context) as answer, uncompiled():
        from mcore_bridge.commands.hub import ADAPTER, MODEL, locate, quantize_of
        from mcore_bridge.commands.report import progress
        from mcore_bridge.commands.written import Written, render
        from mcore_bridge.convert.convert import merge

        base = locate(base, MODEL, download=download)
        adapter = locate(adapter, ADAPTER, download=download)
        with progress(Console(stderr=True), processes) as on_event:
            form = quantize_of(quantize, download=download)
            merged = merge(base, adapter, target, quantize=form, num_processes=processes, on_event=on_event)
        answer(Written.of(merged, target), render)


@app.command("draw")
def draw_command(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(
            parser=path, help="Folder with a config.json, or that file; or a name on the hub.", show_default=False
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            parser=path, help="HF folder without weights; they are written. It may be CONFIG.", show_default=False
        ),
    ],
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers, instead of that of the config.", show_default=False)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE.format("Of the tensors", "as in the config"))] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Other seeds draw other values.")] = 0,
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw the weights of a config at random, and write them as transformers does.

    Norms are around one, all else is around zero, and no value is zero or one. So verify can tell all tensors apart,
    which it could not with the weights that transformers begins a training with. The model has to fit into memory.
    """
    with running(context) as answer:
        from mcore_bridge.commands import text
        from mcore_bridge.commands.draw import draw, render
        from mcore_bridge.commands.hub import CONFIG, locate
        from mcore_bridge.commands.report import progress
        from mcore_bridge.weights.progress import show_progress

        wanted = dtype_of(dtype)
        config = locate(config, CONFIG, download=download)
        console = Console(stderr=True)

        def say(parameters: int, num_bytes: int) -> None:
            console.print(f"drawing {text.count(parameters)} parameters, {text.num_bytes(num_bytes)}", highlight=False)

        with progress(console, 1) as on_event, show_progress(partial(on_event, 0)):
            drawn = draw(config, target, num_layers=layers, dtype=wanted, seed=seed, on_size=say)
        answer(drawn, render)


@app.command("doctor")
def doctor_command(context: typer.Context, json: Json = False) -> None:
    """Show the installed packages and the features that work with them. The exit code is 1 if a change is needed."""
    with running(context) as answer:
        from mcore_bridge.commands.doctor import examine, render

        diagnosis = examine()
        answer(diagnosis, render)
        if not diagnosis.ready:
            raise typer.Exit(1)

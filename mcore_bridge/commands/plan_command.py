"""The command ``plan``: shows the memory and exports of a mesh, or suggests meshes that fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mcore_bridge.commands.options import (
    BANDWIDTH,
    DTYPE,
    NODE,
    Batch,
    Cp,
    Debug,
    Download,
    Ep,
    Etp,
    Json,
    Layout,
    Model,
    Mtp,
    Pp,
    Sp,
    Strict,
    Tp,
    UsageError,
    Vision,
    Vp,
    build_options,
    dtype_of,
    finite,
    of_command_line,
    one_of,
    path,
)
from mcore_bridge.commands.run_command import Answer, given_options, in_options, options_of, refuse, running, uncompiled
from mcore_bridge.machine import uncollected

_OF_ONE_MESH = {"vp", "layout", "sp", "mtp", "world", "engine_tp", "engine_pp", "engine_ep", "picture", "settings"}
_OF_REPORT = {"bandwidth", "engine_tp", "engine_pp", "engine_ep", "picture"}
_OF_SEARCH = {"gpus_per_node", "gpu_memory", "sequence", "micro_batch", "recompute"}


def plan_command(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(parser=path, help="Folder with a config.json, or a name on the hub; weights are not read.")
    ],
    tp: Tp = 1,
    pp: Pp = 1,
    vp: Vp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    sp: Sp = False,
    layout: Layout = None,
    mtp: Mtp = 0,
    vision: Vision = "text_only",
    model: Model = "gpt",
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the whole job; by default those of one replica.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE.format("Of the parameters", "as in the config"))] = None,
    bandwidth: Annotated[
        float,
        typer.Option(
            min=1e-3,
            callback=finite,
            help="GB/s that each rank receives from others, to predict the time. The default was measured within one "
            "node: exports of 16 and 61 GB among 4 H200s by NVLink.",
        ),
    ] = BANDWIDTH,
    engine_tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor parallel size of rollout engines; also show the cost of feeding them."),
    ] = None,
    engine_pp: Annotated[int | None, typer.Option(min=1, help="Pipeline parallel size of such engines.")] = None,
    engine_ep: Annotated[
        int | None, typer.Option(min=1, help="Expert parallel size of such engines, a divisor of --engine-tp.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Suggest meshes for so many GPUs instead. Sizes that are given are not searched."),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="With --gpus: GPUs of a node. Tensor parallelism stays within one.")
    ] = NODE,
    gpu_memory: Annotated[
        float, typer.Option(min=1, callback=finite, help="With --gpus: GB that a rank may need.")
    ] = 72.0,
    sequence: Annotated[int, typer.Option(min=1, help="With --gpus: tokens of a sequence in training.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="With --gpus: sequences of a microbatch.")] = 1,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="With --gpus: keep only the inputs of layers for the backward pass.")
    ] = False,
    settings: Annotated[
        str | None,
        typer.Option(
            help='Print only the mesh, as settings of a trainer: YAML for "verl" or "nemo-rl", arguments for "slime".'
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option(parser=path, help="Also draw the plan to this file, *.svg.")] = None,
    strict_config: Strict = False,
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what every rank of a mesh would hold, and the traffic of an export, without starting a process.

    The numbers are those of the model that megatron-core builds for each kind of layer, on the meta device.
    With --gpus the command suggests meshes: those that fit into memory in training, best first.
    """
    with running(context) as answer, uncollected(), uncompiled():
        from mcore_bridge.commands.hub import CONFIG, locate

        if gpus is not None:
            refuse(context, _OF_ONE_MESH, "with --gpus, which searches meshes")
        else:
            refuse(context, _OF_SEARCH, "without --gpus")
        options, wanted = build_options(context), dtype_of(dtype)
        if gpus is not None:
            folder = locate(folder, CONFIG, download=download)
            _suggest(context, answer, folder, gpus, Batch(sequence, micro_batch, recompute))
            return
        if settings is not None:
            _print_settings(context, answer, folder, settings)
            return
        from mcore_bridge.commands.plan.picture import draw
        from mcore_bridge.commands.plan.tables import Planned, plan, render
        from mcore_bridge.weights.plan.target import engine_ranks

        if picture is not None and picture.suffix.lower() != ".svg":
            raise UsageError(f"--picture must be a file *.svg, found {picture}: the picture is written as SVG")
        asked = engine_tp or engine_pp or engine_ep
        with of_command_line():
            engine = engine_ranks(tp=engine_tp or 1, pp=engine_pp or 1, ep=engine_ep or 1) if asked else ()
        folder = locate(folder, CONFIG, download=download)
        mesh_plan = plan(folder, options, dtype=wanted, world_size=world)
        planned = Planned.of(mesh_plan, engine, bandwidth=bandwidth)
        if picture is not None:
            draw(planned, picture)
        answer(planned, render)


def _print_settings(context: typer.Context, answer: Answer, folder: Path, trainer: str) -> None:
    from mcore_bridge.commands.hub import CONFIG, locate
    from mcore_bridge.commands.plan.tables import blueprint_of
    from mcore_bridge.commands.plan.trainer_settings import TRAINERS, render, settings_for
    from mcore_bridge.weights.provenance import provenance_of

    one_of("settings", trainer, TRAINERS)
    refuse(context, _OF_REPORT, "with --settings")
    options, given = build_options(context), context.params
    folder = locate(folder, CONFIG, download=given["download"])
    blueprint = blueprint_of(provenance_of(folder, head=None), options, dtype=dtype_of(given["dtype"]))
    dims = blueprint.dims
    for ranks_of_data in (dims.dp, dims.edp):
        ranks_of_data(given["world"] or dims.smallest_world)  # raises if the ranks do not fit the mesh
    answer(settings_for(trainer, dims, blueprint.config.num_layers), partial(render, trainer))


def _suggest(context: typer.Context, answer: Answer, folder: Path, gpus: int, batch: Batch) -> None:
    from mcore_bridge.commands.plan import suggest_report
    from mcore_bridge.commands.plan.suggest import AXES, suggest
    from mcore_bridge.commands.report import progress

    given = given_options(context)
    options: dict[str, Any] = context.params
    with progress(Console(stderr=True), 1) as on_event:
        search = suggest(
            folder,
            gpus,
            build_options(context),
            gpu_bytes=options["gpu_memory"] * 1e9,
            given={axis: options[axis] for axis in AXES if axis in given},
            batch=batch,
            gpus_per_node=options["gpus_per_node"],
            dtype=dtype_of(options["dtype"]),
            bandwidth=options["bandwidth"],
            on_event=on_event,
        )
    options_here = options_of(context)
    refused = tuple(replace(refused, reason=in_options(refused.reason, options_here)) for refused in search.refused)
    answer(replace(search, refused=refused), suggest_report.render)
    if not search.suggestions:
        raise typer.Exit(1)

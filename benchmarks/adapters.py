"""Times a step with LoRA, and exports of base and merged weights, of this library and of Megatron-Bridge.

    torchrun --nproc-per-node 1 benchmarks/adapters.py --site SITE "qwen3-8b" "qwen3-30b-a3b layers=12"
    torchrun --nproc-per-node 1 benchmarks/adapters.py --only ours --device cpu --tokens 64 "tiny-moe layers=1"
    torchrun --nproc-per-node 1 benchmarks/adapters.py --sets 8 "qwen3-8b" "qwen3-30b-a3b layers=12"

All linear layers of attention and MLP have adapters, with one A for each layer of megatron-core. Each expert has a
separate adapter: Megatron-Bridge's ``share_expert_adapters=False``. Weights and tokens are as in ``train.py``. The
libraries are measured in turns. SITE is as for ``peers.py``; Megatron-Bridge needs megatron-core 0.19.2. Each line of
JSON is one measurement, for a file in ``results``: a step (``tokens_s``), or an export that drops each tensor at the
next one. Its ``extra_gb`` is GPU memory beside the model. With ``--sets``, a line compares steps of this library alone:
a batch in which each row has a set (``rows``), beside the same batch with one set (``one``).
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import config_of, from_the_first, report, shapes_of, summary, timed
from libraries import MegatronBridge, Pairs
from steps import WARM_UP, Build, fill, in_turns, step_arguments, text, timed_steps
from transformers import AutoConfig

import mcore_bridge as mb

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Adapted(NamedTuple):
    """A model with adapters, and its exports: merged weights, or the base alone."""

    model: Any
    export: Callable[[bool], Pairs]


def main() -> None:
    """Each case by each library, in turns."""
    parser = step_arguments(__doc__, BUILDS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sets", type=int, default=0, help="measure a batch with so many sets, by our library alone")
    arguments = parser.parse_args()
    arguments.only = "ours" if arguments.sets else arguments.only
    for fields, build in in_turns(arguments, BUILDS, config_of):
        (measure_sets if arguments.sets else measure)(build(), arguments, **fields, rank=arguments.rank)


def measure(adapted: Adapted, arguments: Namespace, **fields: Any) -> None:
    """A report of a step, and of each export."""
    fill(adapted.model)
    trained = sum(parameter.numel() for parameter in adapted.model.parameters() if parameter.requires_grad)
    fields["trained_m"] = round(trained / 1e6, 3)
    steps = timed_steps(adapted.model, text(arguments.tokens, arguments.device), arguments.tokens, arguments.repeats)
    report(**fields, measure="step", **steps)
    for merged in (False, True):
        first, seconds, peak = from_the_first(lambda merged=merged: drain(adapted.export(merged)), arguments.repeats)
        num_bytes = sum(tensor.nbytes for _, tensor in adapted.export(merged))
        extra = {"first_s": round(first, 4), "extra_gb": round(peak / 1e9, 3)}
        report(**fields, measure="export", merged=merged, **summary(seconds, num_bytes), **extra)


def measure_sets(adapted: Adapted, arguments: Namespace, **fields: Any) -> None:
    """A report of steps in which each row has a set, and of steps with one set, in turns."""
    model, rank, num_sets = adapted.model, arguments.rank, arguments.sets
    fill(model)
    names = ["default", *map(str, range(1, num_sets))]
    for name in names[1:]:
        mb.add_adapters(model, rank=rank, alpha=2 * rank, targets=TARGETS, kind="shared", init="xavier", name=name)
        fill(model)
    ids = text(arguments.tokens, arguments.device)["input_ids"].view(num_sets, -1)

    def step(rows: list[str] | None) -> None:
        mb.forward(model, ids, adapters=rows, loss=lambda outputs, _: -outputs.log_probs.mean())

    steps = {"one": partial(step, None), "rows": partial(step, names)}
    for run in steps.values():
        timed(run, WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.repeats):
        for name, run in steps.items():
            seconds[name] += timed(run, 1)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    found = {f"{name}_s": round(median, 5) for name, median in medians.items()}
    report(**fields, measure="sets", sets=num_sets, **found, ratio=round(medians["rows"] / medians["one"], 3))


def drain(pairs: Pairs) -> None:
    """Take every tensor, and keep none."""
    for _ in pairs:
        pass


def ours(folder: Path, sizes: dict[str, int], arguments: Namespace) -> Adapted:
    """By this library."""
    models = mb.build_model(
        folder,
        dims=mb.ParallelDims(**sizes),
        dtype=torch.bfloat16,
        device=arguments.device,
        backend=arguments.backend,
        load_weights=False,
    )
    rank = arguments.rank
    mb.add_adapters(models, rank=rank, alpha=2 * rank, targets=TARGETS, kind="shared", init="xavier")
    return Adapted(models[0], lambda merged: mb.iter_hf_weights(models, merged=merged))


def theirs(folder: Path, sizes: dict[str, int], arguments: Namespace) -> Adapted:
    """Measure Megatron-Bridge, which looks up exported names in an index."""
    from megatron.bridge.peft.lora import LoRA

    names = dict.fromkeys((name for name, _ in shapes_of(AutoConfig.from_pretrained(folder))), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    library, rank = MegatronBridge(folder, sizes, arguments.device), arguments.rank
    adapters = LoRA(target_modules=[*TARGETS], dim=rank, alpha=2 * rank, share_expert_adapters=False)
    library.models = adapters(library.models)
    return Adapted(library.models[0], lambda merged: library.export(merge_adapter_weights=merged))


BUILDS: dict[str, Build[Adapted]] = {"ours": ours, "megatron_bridge": theirs}


if __name__ == "__main__":
    main()

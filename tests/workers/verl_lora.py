"""The life of a model with adapters in verl's own Megatron engine, on any device."""

import itertools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_bridge import ParallelDims
from tests.support.written_weights import read
from tests.workers.verl_engine import engine_of
from tests.workers.verl_life import differing, inferred, optimizer_state, resumed, step


def sent(engine: Any, **options: Any) -> tuple[dict[str, Any], Any]:
    """The weights that a rollout would get, on the CPU, and the config of the adapter."""
    stream, config = engine.get_per_tensor_param(**options)
    return {name: tensor.cpu().clone() for name, tensor in stream}, config


def life(dims: ParallelDims, folder: str, out: str, lora: dict[str, Any], value: bool = False) -> list[str]:
    """Init, load, export, infer, a step, away and back, save; then engines that resume and that take the adapter.

    Returns:
        What is wrong.
    """
    from verl.utils.device import get_device_name

    options = {"vanilla": False, "value": value}
    engine = engine_of(folder, dims, lora=lora, **options)
    vocab_size, truth = engine.model_config.hf_config.vocab_size, read(folder)
    wrong, said = [] if value else sends(engine, lora, truth, "at first"), inferred(engine, vocab_size)
    wrong += ["there is no gradient"] if step(engine, vocab_size, said) == 0 else []
    wrong += [] if value else sends(engine, lora, truth, "after a step", moved=True)
    now = inferred(engine, vocab_size)
    if not value:  # a critic has no reference, and its head is trained in addition to its adapters
        with engine.disable_adapter():
            reference = inferred(engine, vocab_size)
        wrong += [f"{name} of the reference differ" for name in said if not torch.equal(reference[name], said[name])]
    wrong += [f"{name} are those before the step" for name in said if torch.equal(now[name], said[name])]
    trained = adapters(engine)
    engine.to("cpu")
    engine.save_checkpoint(out, global_step=1)
    engine.to(get_device_name())
    other = resumed(engine_of(folder, dims, lora=lora, **options), out, vocab_size, said)
    wrong += [f"{name} is lost" for name in differing(adapters(other), trained)]
    wrong += [
        f"{name} are lost" for name, after in inferred(other, vocab_size).items() if not torch.equal(after, now[name])
    ]
    states = itertools.zip_longest(optimizer_state(engine), optimizer_state(other), fillvalue=torch.empty(0))
    wrong += ["the optimizer's state is lost" for here, there in states if not torch.equal(here.cpu(), there.cpu())]
    for path in ("huggingface/adapter", "dist_ckpt"):
        given = {**lora, "adapter_path": str(Path(out) / "model" / path)}
        taken = adapters(engine_of(folder, dims, lora=given, **options))
        wrong += [f"{path}: {name} differs" for name in differing(taken, trained)]
    saved = load_file(Path(out) / "model" / "huggingface" / "adapter" / "adapter_model.safetensors")
    return wrong + [f"{name} was saved otherwise" for name in differing(saved, trained)]


def adapters(engine: Any) -> dict[str, Any]:
    return {name: tensor.cpu().clone() for name, tensor in engine.bridge.export_adapter_weights(engine.module)}


def sends(engine: Any, lora: dict[str, Any], truth: dict[str, Any], when: str, moved: bool = False) -> list[str]:
    """Errors of the weights for a rollout: merged weights, or the base and then the trained factors."""
    weights, config = sent(engine)
    changed = differing(weights, truth)
    if lora["merge"]:
        wrong = ["a config"] if config else []
        return wrong + ([] if bool(changed) == moved and weights.keys() == truth.keys() else [f"{when}: {changed}"])
    own, again = sent(engine, base_sync_done=True)
    second = [tensor.any() for name, tensor in own.items() if ".lora_B." in name]
    wrong = [f"{when}, {name} of the base" for name in changed]
    wrong += [] if second and all(bool(each) == moved for each in second) else [f"{when}, B {second}"]
    asked = (lora["rank"], lora.get("alpha", 32))
    return wrong + [f"{each}" for each in (config, again) if (each["r"], each["lora_alpha"]) != asked]

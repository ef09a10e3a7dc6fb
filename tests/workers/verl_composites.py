"""A composite of text and images in verl's own Megatron engine, which takes it for a model of images."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_bridge import ParallelDims
from mcore_bridge.config.hf import read_config
from tests.support import composites
from tests.support.composites import parts_of
from tests.support.trainer_calls import violations
from tests.workers.verl_engine import engine_of, exported
from tests.workers.verl_life import PROMPT, TEMPERATURE, copied, differing, inferred, padded, step


def exact_engine(folder: str, dims: ParallelDims, options: dict[str, Any]) -> Any:
    """An engine in fp32, which verl's config refuses, and its engine does not."""
    from verl.utils.torch_dtypes import PrecisionType

    with mock.patch.object(PrecisionType, "to_dtype", return_value=torch.float32):
        return engine_of(folder, dims, **options)


def life(dims: ParallelDims, folder: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Runs in a worker: load, export, infer, a step and a save of one engine; then an engine of what was saved.

    Args:
        dims, folder, out, options: as for ``verl_life.life``.
    """
    engine = exact_engine(folder, dims, options)
    vocab_size = engine.model_config.hf_config.text_config.vocab_size
    text, _ = parts_of(folder)
    broken, order = violations(exported(engine), text)
    said = inferred(engine, vocab_size)
    step(engine, vocab_size, said)
    trained = copied(engine)
    engine.save_checkpoint(out, global_step=1)
    again = exact_engine(str(Path(out) / "model" / "huggingface"), dims, options)
    broken += [f"{name} is not what was saved" for name in differing(copied(again), trained)]
    broken += [] if differing(trained, text) else ["nothing was trained"]
    return {"broken": broken, "order": order, "said": said, "trained": trained}


def reference(folder: str) -> Tensor:
    """The log-probs of the responses of the batch by transformers' composite, without images."""
    model = composites.model_class(read_config(folder).model_type).from_pretrained(folder, dtype=torch.float32).eval()
    ids, mask = padded(model.config.text_config.vocab_size)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    scores = (logits[:, PROMPT - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    return scores.gather(-1, ids[:, PROMPT:, None])[..., 0]


def problems(ranks: list[dict[str, Any]], folder: str, out: Path) -> list[str]:
    """Errors of a life, from the results of ``life`` on each rank."""
    saved, copied = parts_of(out / "model" / "huggingface")
    found = [f"rank {rank}: {problem}" for rank, each in enumerate(ranks) for problem in each["broken"]]
    found += [f"rank {rank} has another order" for rank, each in enumerate(ranks) if each["order"] != ranks[0]["order"]]
    found += [f"{name} was saved otherwise" for each in ranks for name in differing(saved, each["trained"])]
    found += [f"{name} was copied otherwise" for name in differing(copied, parts_of(folder)[1])]
    wanted, shown = reference(folder), padded(2)[1][:, PROMPT:].bool()
    error = float((ranks[0]["said"]["log_probs"] - wanted)[shown].abs().max() / wanted[shown].abs().max())
    print(f"    log_probs are {error:.1e} off", flush=True)
    return found + ([f"log_probs are {error:.1e} off"] if error > 1e-5 else [])

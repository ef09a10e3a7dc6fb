"""A composite with its tower in verl's own Megatron engine: log-probs of rows with images, a step, a save."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge import ParallelDims
from tests.support import seeing
from tests.support.trainer_calls import violations
from tests.support.written_weights import read
from tests.workers.verl_composites import exact_engine
from tests.workers.verl_engine import exported, kernels_on_cpu
from tests.workers.verl_life import copied, differing

PROMPT = 6
Batch = tuple[Tensor, Tensor, list[dict[str, Tensor] | None]]


def data_of(batch: Batch, **fields: Tensor) -> Any:
    """A batch of ``seeing`` as verl's workers hand it to an engine, a row to a micro-batch. One row has no image."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    ids, mask, images = batch
    own = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    own |= {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "response_mask": mask[:, PROMPT:]}
    data = TensorDict({**own, **fields}, batch_size=[len(ids)])
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [each or {} for each in images])
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, temperature=1.0, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    tu.assign_non_tensor(data, calculate_entropy=True, global_batch_size=len(ids))
    return data


def log_probs_of(engine: Any, batch: Batch) -> Tensor:
    """The last stage's log-probs of all responses, on all ranks: ``[rows, seq - PROMPT]``."""
    from verl.workers.utils.padding import no_padding_2_padding

    data = data_of(batch)
    with engine.eval_mode():
        said = engine.infer_batch(data).get("model_output", {})
    ours = no_padding_2_padding(said["log_probs"].float(), data) if said else None
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ours)
    log_probs: Tensor = everywhere[-1]
    return log_probs


def life(dims: ParallelDims, folder: str, out: str, options: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Runs in a worker: load, export, infer, a step and a save of an engine whose tower is trained or frozen.

    Args:
        dims, folder, out, options: as for ``verl_life.life``.
        batch: ids, mask and images.
    """
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    if options.get("use_fused_kernels"):
        kernels_on_cpu()
    engine = exact_engine(folder, dims, options)
    broken, order = violations(exported(engine), read(folder))
    log_probs = log_probs_of(engine, batch)
    loss = partial(ppo_loss, config=ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1))
    wanted = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2))
    with engine.train_mode():
        engine.train_batch(data_of(batch, old_log_probs=log_probs, advantages=wanted), loss)
    trained = copied(engine)
    engine.save_checkpoint(out, global_step=1)
    saved = read(str(Path(out) / "model" / "huggingface"))
    broken += [f"{name} was saved otherwise" for name in differing(saved, trained)]
    return {"broken": broken, "order": order, "log_probs": log_probs, "trained": trained}


def problems(ranks: list[dict[str, Any]], folder: str, batch: Batch, *, frozen: bool) -> list[str]:
    """Errors of a life, from the results of ``life`` on each rank."""
    before = read(folder)
    found = [f"rank {rank}: {problem}" for rank, each in enumerate(ranks) for problem in each["broken"]]
    found += [
        f"{name} differs among ranks" for each in ranks for name in differing(each["trained"], ranks[0]["trained"])
    ]
    changed = set(differing(ranks[0]["trained"], before))
    untouched = {name for name in before if "visual" in name and name not in changed}
    found += ["a frozen tower was trained"] if frozen and any("visual" in name for name in changed) else []
    found += [f"{name} was not trained" for name in untouched if not frozen]
    log_probs, _ = seeing.expected(seeing.reference(Path(folder)), *batch)
    wanted = log_probs[:, PROMPT:]  # 0 at places that are not compared: padding and image tokens
    error = float((ranks[0]["log_probs"] - wanted)[wanted != 0].abs().max() / wanted.std())
    print(f"    log_probs are {error:.1e} off", flush=True)
    return found + ([f"log_probs are {error:.1e} off"] if not error < 3e-5 else [])

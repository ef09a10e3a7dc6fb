"""The life of a model in verl's own Megatron engine, on any device: what verl's tests of it ask, and what we promise.

Of verl's tests these are that of the actor's engine (log-probs and values of a padded batch against transformers, a
step of PPO with states moved away and back) and the differential one (the parts that ranks hold, put together, are
the export, bit by bit). ``life`` runs on every rank, ``problems`` looks at what all of them returned.
"""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from tests.support.pieces import merged
from tests.support.stepping import masters
from tests.support.trainer_calls import violations
from tests.support.written_weights import read
from tests.workers.verl_engine import engine_of, exported

SEQUENCES, LENGTH, PROMPT = 8, 32, 16
TEMPERATURE = 0.8
BOUNDS = {"log_probs": (1e-3, 1e-2), "entropy": (1e-3, 1e-2), "values": (1e-2, 1e-2)}
"""Absolute and relative bounds of the mean over all responses, as in verl's tests, which have none for entropies."""
APART = 5.0
"""The bound for the median distance to transformers' outputs in fp32, as a multiple of the distance of transformers in
bf16. A mean could hide exchanged outputs, and a router that decides differently for one token changes a mean. Sums over
tensor ranks exceed 1, because each rank rounds its part. A token of padding in a softmax of nine gives 40.
"""


def with_tokenizer(folder: Path) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(90)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="3", eos_token="1", bos_token="2"
    )
    fast.save_pretrained(folder)
    return str(folder)


def padded(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask ``[SEQUENCES, LENGTH]``, padded on either side; each has a prompt and a response."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 7, (SEQUENCES, 1), generator=generator)
    stops = starts + torch.randint(19, 26, (SEQUENCES, 1), generator=generator)
    places = torch.arange(LENGTH)
    ids = torch.randint(0, vocab_size, (SEQUENCES, LENGTH), generator=generator)
    return ids, ((places >= starts) & (places < stops)).long()


def batch_of(vocab_size: int, rows: slice = slice(None), **fields: Tensor) -> Any:
    """Rows of the batch as verl's workers hand them to an engine, two to a micro-batch.

    Args:
        vocab_size: of the model.
        rows: which of them.
        fields: of all rows, ``[SEQUENCES, LENGTH - PROMPT]``.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    ids, mask = padded(vocab_size)
    own = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    own |= {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "response_mask": mask[:, PROMPT:]}
    data = TensorDict({**own, **fields}, batch_size=[SEQUENCES])[rows]
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, temperature=TEMPERATURE, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    tu.assign_non_tensor(data, calculate_entropy=True, global_batch_size=SEQUENCES)
    return data


def inferred(engine: Any, vocab_size: int) -> dict[str, Tensor]:
    """The last stage's output for all responses, on all ranks and on the CPU: fp32 ``[SEQUENCES, LENGTH - PROMPT]``."""
    from verl.workers.utils.padding import no_padding_2_padding

    data = batch_of(vocab_size)
    with engine.eval_mode():
        said = engine.infer_batch(data).get("model_output", {})
    ours = {name: no_padding_2_padding(tensor.float().cpu(), data) for name, tensor in said.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ours)
    return everywhere[-1]


def step(engine: Any, vocab_size: int, before: dict[str, Tensor]) -> float | None:
    """A step of PPO, of an actor or a critic, on this replica's rows. Return the norm of the gradient, if verl has
    it.
    """
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    generator = torch.Generator().manual_seed(2)
    wanted = torch.randn(SEQUENCES, LENGTH - PROMPT, generator=generator)
    loss: Any
    if "values" in before:
        loss = partial(value_loss, config=CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=2))
        fields = {"values": before["values"], "returns": before["values"] + wanted}
    else:
        loss = partial(ppo_loss, config=ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2))
        fields = {"old_log_probs": before["log_probs"], "advantages": wanted}
    rows = slice(engine.get_data_parallel_rank(), None, engine.get_data_parallel_size())
    with engine.train_mode():
        found = engine.train_batch(batch_of(vocab_size, rows, **fields), loss)
    return float(found["metrics"]["grad_norm"]) if engine.is_mp_src_rank_with_outputs() else None


def copied(engine: Any) -> dict[str, Tensor]:
    """The export, on the CPU."""
    return {name: tensor.cpu().clone() for name, tensor in exported(engine)}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    names = found.keys() | expected.keys()
    return sorted(
        name for name in names if name not in found or name not in expected or not equal(found[name], expected[name])
    )


def equal(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def differential(engine: Any) -> list[str]:
    """The check of verl's differential test: the joined parts of all ranks equal the export, and nothing is missing.

    If several ranks hold a part, their bits agree.
    """
    expected = copied(engine)
    held = [replace(piece, tensor=piece.tensor.detach().cpu()) for piece in mb.iter_hf_shards(engine.module)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    return differing(merged(itertools.chain(*everywhere)), {name: tensor.float() for name, tensor in expected.items()})


def optimizer_state(engine: Any) -> list[Tensor]:
    """Main parameters and their moments; not the steps, which mcore miscounts without TransformerEngine."""
    wrapped = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [
        tensor
        for each in wrapped
        for parameter, state in each.optimizer.state.items()
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    ]


def stale(engine: Any, trained: dict[str, Tensor]) -> list[str]:
    """Names of exported tensors that differ from the cast values of the optimizer."""
    for parameter, value in masters(engine.module, engine.optimizer).items():
        parameter.data.copy_(value)
    return differing(copied(engine), trained)


def away(engine: Any) -> list[str]:
    """The tensors that are not on the CPU after verl has moved everything there."""
    from verl.utils.megatron_utils import get_megatron_module_device

    engine.to("cpu")
    found = [] if get_megatron_module_device(engine.module) == "cpu" else ["parameters"]
    return found + ["optimizer" for tensor in optimizer_state(engine) if tensor.device.type != "cpu"]


def resumed(engine: Any, out: str, vocab_size: int, said: dict[str, Tensor]) -> Any:
    """An engine that has trained further than the first one, and then resumes from what that one saved."""
    for _ in range(2):  # without TransformerEngine mcore's optimizer resumes only what has taken a step
        step(engine, vocab_size, said)
    engine.load_checkpoint(out, del_local_after_load=False)
    return engine


def life(dims: ParallelDims, folder: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Init, load, export, infer, a step, away and back, save; then a second engine, which resumes.

    Args:
        dims: the mesh.
        folder: of an HF checkpoint with a tokenizer.
        out: of the checkpoint that verl writes.
        options: of ``engine_of``.
    """
    from megatron.core.utils import unwrap_model
    from verl.utils.device import get_device_id, get_device_name

    engine = engine_of(folder, dims, **options)
    vocab_size = engine.model_config.hf_config.vocab_size
    truth = {name: tensor.to(get_device_id()) for name, tensor in read(folder).items()}
    broken, order = violations(exported(engine), None if options.get("value") else truth)
    broken += [f"the pieces of {name} are not the export" for name in differential(engine)]
    head, said = copied(engine).get("score.weight"), inferred(engine, vocab_size)
    norm = step(engine, vocab_size, said)
    trained = copied(engine)
    engine.to(get_device_name())
    broken += [f"{name} is not what the optimizer holds" for name in stale(engine, trained)]
    broken += [f"{name} did not go away" for name in away(engine)]
    engine.save_checkpoint(out, global_step=1)
    engine.to(get_device_name())
    broken += [f"{name} came back otherwise" for name in differing(copied(engine), trained)]
    other = resumed(engine_of(folder, dims, **options), out, vocab_size, said)
    other.to(get_device_name())
    broken += [f"{name} is lost" for name in differing(copied(other), trained)]
    states = itertools.zip_longest(optimizer_state(engine), optimizer_state(other), fillvalue=torch.empty(0))
    broken += ["the optimizer's state is lost" for here, there in states if not torch.equal(here.cpu(), there.cpu())]
    bridge = type(engine.bridge).__module__
    return {
        "broken": broken,
        "order": order,
        "said": said,
        "head": head,
        "norm": norm,
        "trained": trained,
        "bridge": bridge,
        "models": sorted({type(unwrap_model(chunk)).__name__ for chunk in engine.module}),
    }


def reference(folder: str, head: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """transformers' results for the responses of the batch, by the names of verl's outputs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids, mask = padded(model.config.vocab_size)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
    if head is not None:
        return {"values": (output.hidden_states[-1][:, PROMPT - 1 : -1].float() @ head.float().T)[..., 0]}
    scores = (output.logits[:, PROMPT - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    log_probs = scores.gather(-1, ids[:, PROMPT:, None])[..., 0]
    return {"log_probs": log_probs, "entropy": -(scores.exp() * scores).sum(-1)}


def far(found: dict[str, Tensor], folder: str, head: Tensor | None) -> list[str]:
    """The outputs that differ from transformers' beyond the bound. The difference of each is printed."""
    rounded, exact = (reference(folder, head, dtype) for dtype in (torch.bfloat16, torch.float32))
    shown = padded(2)[1][:, PROMPT:].bool()
    problems = [] if found.keys() == exact.keys() else [f"verl gave {sorted(found)}, expected {sorted(exact)}"]
    for name in found.keys() & exact.keys():
        absolute, relative = BOUNDS[name]
        mean, known = float(found[name][shown].mean()), float(rounded[name][shown].mean())
        half, allowed = (float((each[name] - exact[name])[shown].abs().median()) for each in (found, rounded))
        line = (
            f"{name}: mean {mean:.5f}, of transformers {known:.5f}; half is {half:.5f} off, of its bf16 {allowed:.5f}"
        )
        print("   ", line, flush=True)
        if not (abs(mean - known) <= absolute + relative * abs(known) and half < APART * allowed):
            problems.append(line)
    return problems


def problems(ranks: list[dict[str, Any]], folder: str, out: Path, *, vanilla: bool) -> list[str]:
    """Errors of a life, from the results of ``life`` on each rank."""
    truth, saved, first = read(folder), read(out / "model" / "huggingface"), ranks[0]
    found = [f"rank {rank}: {problem}" for rank, each in enumerate(ranks) for problem in each["broken"]]
    found += [f"rank {rank} has another order" for rank, each in enumerate(ranks) if each["order"] != first["order"]]
    module = f"mcore_bridge.trainers.{'mbridge' if vanilla else 'megatron_bridge'}"
    found += [f"the bridge is {each['bridge']}" for each in ranks if each["bridge"] != module]
    found += [f"{name} was saved otherwise" for each in ranks for name in differing(saved, each["trained"])]
    if all(torch.equal(saved[name], truth[name]) for name in truth if name in saved):
        found.append("nothing was trained")
    head = first["head"]
    names = truth.keys() if head is None else (truth.keys() - {"lm_head.weight"}) | {"score.weight"}
    if saved.keys() != names:
        found.append(f"saved without {sorted(names - saved.keys())}, and with {sorted(saved.keys() - names)}")
    norms = {each["norm"] for each in ranks if each["norm"] is not None}
    print("    norm of the gradient:", norms, flush=True)
    if not (len(norms) == 1 and all(norm > 0 for norm in norms)):
        found.append(f"the norm of the gradient is {norms}")
    return found + far(first["said"], folder, head)

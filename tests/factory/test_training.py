"""Loss and every gradient on every mesh equal transformers', and one optimizer step leads to transformers' weights."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import Float16Module
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from mcore_bridge import ParallelDims, build_model, to_hf_state_dict
from tests.support import pool, stepping, tiny
from tests.support.training import Kind

MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"pp": 2, "vp": 2},
        {"cp": 2},
        {},
        {"pp": 2, "num_layers_in_first_pipeline_stage": 1},
        {"pp": 2, "vp": 2, "layout": "E|ttt||tL"},
    ],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "cp": 2, "sp": True},
        {"cp": 2, "pp": 2},
        {"pp": 4, "layout": "Et|tt|t|L"},
        {"tp": 2, "pp": 2, "layout": "balanced"},
        {"tp": 2},
    ],
    8: [{"tp": 8, "sp": True}, {"tp": 2, "pp": 2, "cp": 2, "sp": True}, {"tp": 2, "sp": True, "pp": 2, "vp": 2}],
}


CASES = {
    "llama": tiny.config("llama", attention_bias=True, mlp_bias=True),
    "llama, o_proj bias, square": tiny.config("llama", **tiny.SQUARE),
    "mistral": tiny.config("mistral"),
    "qwen2, tied": tiny.config("qwen2"),
    "qwen3": tiny.config("qwen3"),
}
KIND = Kind(CASES, MESHES, every=4)


@pytest.mark.parametrize("every", [None, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, every, tmp_path):
    KIND.check(world_size, tmp_path, every=every)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: tiny.random_checkpoint(hf, tmp_path_factory.mktemp("tiny")) for name, hf in CASES.items()}


def tied_copies(folder: str, meshes: list[dict[str, Any]]) -> list[Any]:
    """Runs in each worker: this rank's copies of the word embedding after load, and after a step."""
    found = []
    for sizes in meshes:
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
            weights = [c.shared_embedding_or_output_weight() for c in chunks if c.pre_process or c.post_process]
            before = [weight.detach().clone() for weight in weights]
            stepping.forward_backward(stepping.wrap(chunks), dims, tiny.tokens(16), micro_batch_size=2)
            parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
            for parameter in parameters:
                parameter.grad = parameter.main_grad
            torch.optim.AdamW(parameters, lr=0.1).step()
            found.append((parallel_state.get_tensor_model_parallel_rank(), before, [w.detach() for w in weights]))
    return found


def test_tied_embeddings_stay_tied_after_an_optimizer_step(checkpoints):
    meshes = [{"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vp": 2, "sp": True}, {"pp": 4}]
    ranks = pool.run(4, tied_copies, str(checkpoints["qwen2, tied"]), meshes)
    for results in zip(*ranks, strict=True):
        for tp_rank in {rank for rank, _, _ in results}:
            before = [copy for rank, copies, _ in results if rank == tp_rank for copy in copies]
            after = [copy for rank, _, copies in results if rank == tp_rank for copy in copies]
            assert len(before) == 2
            assert torch.equal(*before)
            assert torch.equal(*after)
            assert not torch.equal(before[0], after[0])


def recomputed(folder: str, options: list[dict[str, Any]]) -> list[Any]:
    """Run in each worker: gradients with dropout from equal seeds, for each kind of recompute."""
    found = []
    dims = ParallelDims(tp=2, sp=False)
    for overrides in options:
        with stepping.mesh(dims):
            seed_everything(7)
            dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
            step = stepping.train(folder, dims, tiny.tokens(4), overrides={**dropout, **overrides})
            found.append((step["loss"], step["grads"]))
    return found


def seed_everything(seed: int) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)


def test_recompute_repeats_dropout(checkpoints):
    options = [
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ]
    (loss, grads), *others, (without, _) = pool.run(2, recomputed, str(checkpoints["qwen3"]), options)[0]
    assert abs(loss - without) > 1e-3, "dropout did nothing"
    for other, found in others:
        assert torch.equal(loss, other)
        assert all(tiny.relative_error(found[name], grads[name]) < 1e-5 for name in grads)


def dropped(folder: str) -> Any:
    """Run in each worker: the places that dropout zeroes in attention, twice, and outside of attention."""
    with stepping.mesh(ParallelDims(tp=2)):
        (chunk,) = build_model(folder, device="cpu", dtype=torch.float32, overrides={"attention_dropout": 0.5})
        seed_everything(7)
        core, ones = chunk.decoder.layers[0].self_attention.core_attention, torch.ones(8, 1, 4, 14)
        first, second = core(ones, ones, ones), core(ones, ones, ones)
        return first, second, torch.nn.functional.dropout(ones)


def test_tp_ranks_drop_different_heads_and_the_same_hidden_values(checkpoints):
    (first, second, outside), (other, _, other_outside) = pool.run(2, dropped, str(checkpoints["qwen3"]))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(outside, other_outside)


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):  # type: ignore[misc]  # without types
    """A process reward model as Qwen publishes its code: two linear layers with a relu between."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        size = config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, config.num_labels))
        self.post_init()


HEADS = {
    "value": (tiny.config("llama", num_labels=1), AutoModelForSequenceClassification, {"tp": 2, "sp": True, "pp": 2}),
    "classification": (tiny.config("qwen2", num_labels=3), AutoModelForSequenceClassification, {"tp": 4}),
    "classification with bias": (
        tiny.config("qwen3", num_labels=3),
        AutoModelForTokenClassification,
        {"tp": 2, "sp": True, "cp": 2},
    ),
    "process_reward": (tiny.config("qwen2", num_labels=2), Qwen2ForProcessRewardModel, {"tp": 2, "sp": True, "pp": 2}),
}


def head_steps(jobs: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    """Runs in each worker: a step with a head."""
    found = []
    for folder, head, sizes in jobs:
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            found.append(stepping.train(folder, dims, tiny.tokens(8), micro_batch_size=2, head=head))
    return found


def test_heads_train_as_transformers_does(tmp_path):
    jobs, models = [], []
    for name, (hf, model_class, sizes) in HEADS.items():
        folder = tiny.random_checkpoint(hf, tmp_path / name.replace(" ", "-"), model_class=model_class)
        jobs.append((str(folder), name.split(maxsplit=1)[0], sizes))
        models.append(model_class.from_pretrained(folder, dtype=torch.float32).eval())
    for steps_of_rank in pool.run(4, head_steps, jobs):
        for (name, _), model, step in zip(HEADS.items(), models, steps_of_rank, strict=True):
            hidden = model.base_model(tiny.tokens(8)[:, :-1]).last_hidden_state
            loss = model.score(hidden).float().square().mean()
            model.zero_grad()
            loss.backward()
            assert step["loss"] is None or tiny.relative_error(step["loss"], loss.detach()) < 1e-5, name
            grads = {n: parameter.grad for n, parameter in model.named_parameters()}
            assert step["grads"].keys() == grads.keys(), name
            assert max(tiny.relative_error(step["grads"][n], grads[n]) for n in grads) < 5e-5, name


def half(folder: str) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Runs in each worker: loss and gradients of the bf16 and fp16 pipelines as trainers wrap them."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        dims = ParallelDims(pp=2, vp=2)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=dtype, device="cpu")
            assert {parameter.dtype for chunk in chunks for parameter in chunk.parameters()} == {dtype}
            wrapped = stepping.wrap([Float16Module(chunk.config, chunk) for chunk in chunks])
            loss = stepping.forward_backward(wrapped, dims, tiny.tokens(8), micro_batch_size=2)
            with torch.no_grad():  # gradients have the places of their parameters
                for parameter in stepping.trained(chunks):
                    parameter.copy_(parameter.main_grad)
            found.append((loss, to_hf_state_dict(chunks, dtype=torch.float32)))
    return found


def test_half_precision_trains_in_float16_modules(checkpoints):
    _, loss, grads = tiny.reference(tiny.random_model(CASES["qwen3"]), tiny.tokens(8))
    for found in zip(*pool.run(2, half, str(checkpoints["qwen3"])), strict=True):
        assert tiny.relative_error(found[-1][0], loss) < 0.02
        for _, given in found:
            assert given.keys() == grads.keys()
            assert max(float((given[n] - grads[n]).norm() / grads[n].norm()) for n in grads) < 0.2

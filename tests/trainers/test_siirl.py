"""siiRL's Megatron workers use the library. siiRL must be installed, as in docs/trainers/siirl.md."""

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_bridge import ParallelDims
from tests import zoo
from tests.support import pool
from tests.support.settings_of_trainers import SIIRL
from tests.support.strategies import random_state, save
from tests.support.trainer_calls import violations
from tests.support.written_weights import read
from tests.workers.siirl_worker import LINES, NEEDED, PAGE, arguments_of, batch_of, in_siirl, siirl_module, synced
from tests.workers.verl_life import differing, far, with_tokenizer

_MISSING = [name for name in ("siirl", "ray", "tensordict") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {_MISSING}")

MESHES = {
    "qwen3": ParallelDims(tp=2, pp=2, sp=True),
    "qwen3_moe": ParallelDims(tp=2, ep=2, sp=True),
    "qwen3 as in siiRL's guide": ParallelDims(tp=2, pp=4, sp=True),
}


ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmo2": "Olmo2ForCausalLM"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: checkpoint(tmp_path_factory.mktemp(family), family) for family in ARCHITECTURES}


def checkpoint(folder: Path, family: str) -> str:
    hf = zoo.cases()[family].hf
    hf.architectures, hf.num_hidden_layers = [ARCHITECTURES[family]], 4
    save(random_state(hf, dtype=torch.bfloat16), hf, folder)
    return with_tokenizer(folder)


def worker_of(name: str, config: Any) -> Any:
    """A worker of siiRL, with its model."""
    worker = getattr(siirl_module("engine.megatron_workers"), name)(config)
    worker.init_model()
    return worker


def train(actor: Any, vocab_size: int, log_probs: Tensor) -> None:
    advantages = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2))
    actor.update_actor(batch_of(vocab_size, old_log_probs=log_probs, advantages=advantages))


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pairs}


def life(folder: str, dims: ParallelDims, out: str) -> dict[str, Any]:
    """Run in a worker: an actor and its reference from a command line to a rollout's tensors, trained and resumed."""
    with in_siirl():
        arguments = arguments_of(folder, dims)
        actor = worker_of("ActorWorker", arguments.actor_rollout_ref)
        vocab_size = actor.hf_config.vocab_size
        broken, order = violations(iter(synced(actor, arguments)), read(folder))
        said = actor.compute_log_prob(batch_of(vocab_size))
        reference = worker_of("ReferenceWorker", arguments.actor_rollout_ref)
        known = reference.compute_ref_log_prob(batch_of(vocab_size))["ref_log_prob"]
        train(actor, vocab_size, said["old_log_probs"])
        trained = copied(synced(actor, arguments))
        actor.save_checkpoint(out, global_step=1)
        train(actor, vocab_size, said["old_log_probs"])
        moved = differing(copied(synced(actor, arguments)), trained)
        actor.load_checkpoint(out, del_local_after_load=False)
        broken += [f"{name} is lost" for name in differing(copied(synced(actor, arguments)), trained)]
        return {
            "broken": broken + ([] if moved else ["nothing was trained after saving"]),
            "order": order,
            "bridge": type(actor.bridge).__module__,
            "said": {"log_probs": said["old_log_probs"].clone(), "entropy": said["entropys"].clone()},
            "reference": known.clone(),
            "trained": trained,
        }


@pytest.mark.parametrize("case", MESHES)
def test_an_actor_and_its_reference(case, folders, tmp_path):
    folder, dims, out = folders[case.split()[0]], MESHES[case], tmp_path / "out"
    ranks = pool.run(dims.tp * dims.pp, life, folder, dims, str(out), timeout=500.0)
    saved = read(out / "huggingface")
    for each in ranks:
        assert each["broken"] == []
        assert each["order"] == ranks[0]["order"]
        assert each["bridge"] == "mcore_bridge.trainers.mbridge"
        assert differing(saved, each["trained"]) == []
        assert torch.equal(each["reference"], each["said"]["log_probs"])
    assert differing(saved, read(folder))
    assert far(ranks[-1]["said"], folder, None) == []


def exported(worker: Any) -> dict[str, Tensor]:
    """The export of a critic. Its parameters are moved back to the device before, and away afterwards."""
    memory = siirl_module("utils.megatron.megatron_utils")
    memory.load_megatron_model_to_gpu(worker.critic_module)
    found = copied(worker.bridge.export_weights(worker.critic_module))
    memory.offload_megatron_model_to_cpu(worker.critic_module)
    return found


def critic(folder: str, dims: ParallelDims, out: str) -> tuple[list[str], Tensor, Tensor]:
    """Runs in a worker: trains, saves and resumes a critic; returns lost tensors, its values, and its head."""
    with in_siirl():
        arguments = arguments_of(folder, dims)
        siirl_module("engine.megatron_workers").global_initialize_model_parallel(arguments.actor_rollout_ref)
        worker = worker_of("CriticWorker", arguments.critic)
        before = exported(worker)
        truth = {name: tensor for name, tensor in read(folder).items() if name != "lm_head.weight"}
        lost = differing({**before, **truth}, before)
        batch = batch_of(worker.hf_config.vocab_size)
        values = worker.compute_values(batch)["values"].clone()
        wanted = {"values": values, "returns": values + 1}
        worker.update_critic(batch_of(worker.hf_config.vocab_size, **wanted))
        trained = exported(worker)
        lost += [] if differing(trained, before) else ["nothing was trained"]
        worker.save_checkpoint(out, global_step=1)
        worker.update_critic(batch_of(worker.hf_config.vocab_size, **wanted))
        worker.load_checkpoint(out, del_local_after_load=False)
        lost += differing(exported(worker), trained)
        return lost, values, before["score.weight"]


def test_a_critic(folders, tmp_path):
    dims = MESHES["qwen3"]
    ranks = pool.run(4, critic, folders["qwen3"], dims, str(tmp_path), timeout=300.0)
    assert [lost for lost, _, _ in ranks] == [[]] * 4
    _, values, head = ranks[-1]
    assert far({"values": values}, folders["qwen3"], head) == []


FAILS = {
    "split_rank": "unexpected keyword argument 'pipeline_model_parallel_split_rank'",
    "optimizer_arguments": "unexpected keyword argument 'no_weight_decay_cond'",
    "optimizer_format": "ShardedTensor.flattened_range is not supported",
    "config_as_json": "InferenceCudaGraphScope is not JSON serializable",
}


def failure(folder: str, out: str, name: str) -> str:
    """Runs in a worker: the errors of an actor without one of its requirements, up to its first checkpoint."""
    with in_siirl(but=name):
        arguments = arguments_of(folder, ParallelDims())
        try:
            actor = worker_of("ActorWorker", arguments.actor_rollout_ref)
            log_probs = actor.compute_log_prob(batch_of(actor.hf_config.vocab_size))["old_log_probs"]
            train(actor, actor.hf_config.vocab_size, log_probs)
            actor.save_checkpoint(out, global_step=1)
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", NEEDED)
def test_what_the_page_says_siirl_needs_it_needs(name, folders, tmp_path):
    from megatron.core import __version__

    (said,) = pool.run(1, failure, folders["qwen3"], str(tmp_path), name)
    assert FAILS[name] in PAGE
    if name == "config_as_json" and __version__.startswith("0.16"):
        assert said == ""
    else:
        assert FAILS[name] in said


def test_the_lines_of_the_page_reach_siirls_arguments():
    found = arguments_of("folder", ParallelDims())
    for line in LINES:
        path, _, value = line.partition("=")
        at: Any = found
        for name in path.split("."):
            at = getattr(at, name)
        assert str(at) == value


def test_the_page_has_every_key_of_siirls_megatron():
    assert {field.name for field in fields(siirl_module("params.model_args").MegatronArguments)} == SIIRL


def unknown(folder: str) -> str:
    """Runs in a worker: siiRL's error for an architecture that is not on its list."""
    with in_siirl(), pytest.raises(NotImplementedError) as caught:
        worker_of("ActorWorker", arguments_of(folder, ParallelDims()).actor_rollout_ref)
    return str(caught.value)


def test_siirl_knows_its_own_architectures_only(folders):
    (said,) = pool.run(1, unknown, folders["olmo2"])
    assert "Olmo2ForCausalLM not supported" in said

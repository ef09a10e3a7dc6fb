"""Mamba-2 mixers and the layers that contain them: the recurrence, gradients on every mesh against transformers',
saves.
"""

import functools
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from torch.distributed import get_rank

from mcore_bridge import ParallelDims, build_model, forward, to_layer_spec, to_transformer_config
from mcore_bridge.config.mesh.divisibility import DELTA_CONTEXT, check_model
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.modules.mixers import mixer
from mcore_bridge.factory.modules.mixers.mamba_kernels import CHUNK, scan
from mcore_bridge.rules.names import Numbering, canonical
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.strategies import on_disk, random_state, save
from tests.support.training import Kind

FAMILIES = ("nemotron_h", "granitemoehybrid", "falcon_h1")
CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type in FAMILIES}
SPARSE = {name for name, hf in CASES.items() if to_transformer_config(hf).num_moe_experts}
HF = CASES.get("nemotron_h-narrow-experts")
LENGTH = CHUNK + 16
with_halves = pytest.mark.skipif(HF is None, reason="the installed transformers has no family with layers of one half")


def token_by_token(x, steps, decay, into, out_of, skip):
    """The formula in the docstring of the recurrence, one token after the other."""
    each = x.size(2) // into.size(2)
    into, out_of = (part.repeat_interleave(each, dim=2) for part in (into, out_of))
    state, found = x.new_zeros(*x[:, 0].shape[:2], into.size(-1), x.size(-1)), []
    for v, d, k, q in zip(*(part.unbind(1) for part in (x, steps, into, out_of)), strict=True):
        state = state * (d * decay).exp()[..., None, None] + torch.einsum("bhn,bhp->bhnp", k, d[..., None] * v)
        found.append(torch.einsum("bhnp,bhn->bhp", state, q) + skip[:, None] * v)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("length", [2, CHUNK, 2 * CHUNK + 5])
def test_the_recurrence_in_chunks_is_that_token_by_token(length):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, 4, 10), (2, length, 4), (4,), (2, length, 2, 6), (2, length, 2, 6), (4,)]
    x, steps, decay, into, out_of, skip = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x, torch.nn.functional.softplus(steps), -decay.exp(), into, out_of, skip]
    weight = torch.randn(x.shape, generator=generator)
    results = []
    for rule, dtype in ((scan, torch.float32), (token_by_token, torch.float64)):
        leaves = [part.detach().to(dtype, copy=True).requires_grad_() for part in inputs]
        found = rule(*leaves)
        (found * weight.to(dtype)).sum().backward()
        results.append([found.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert tiny.relative_error(found, expected) < 1e-5


MESHES = {
    1: [{}],
    2: [
        {"tp": 2, "sp": True},
        {"pp": 2, "layout": "Et|tttL"},
        {"pp": 2, "layout": "balanced"},
        {"cp": 2},
        {"ep": 2},
        {"tp": 2, "sp": True, "etp": 2},
    ],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "cp": 2, "ep": 2, "sp": True},
        {"tp": 2, "etp": 2, "ep": 2, "sp": True},
    ],
}


def fits(name, dims):
    return dims.ep == dims.etp == 1 or name in SPARSE


KIND = Kind(CASES, MESHES, every=2, fits=fits, num_sequences=2, seq_len=LENGTH)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


FROZEN = ["embedding.*", "decoder.layers.*.self_attention.in_proj.*", "decoder.layers.1.mlp.*", "!*.linear_fc1.*"]
HELD = (".embeddings.", ".0.mixer.in_proj.", ".3.mixer.in_proj.", ".1.mixer.down_proj.")


def critic_step(folder):
    """Run in each worker: a step of a critic with frozen parameters."""
    dims = ParallelDims(tp=2, sp=True, pp=2)
    with stepping.mesh(dims):
        with pytest.raises(ConfigError, match=r"decoder\.layers\.3\.mlp"):  # on no stage: layer 3 is a mixer alone
            build_model(folder, dims=dims, device="meta", load_weights=False, freeze=["decoder.layers.3.mlp.*"])
        return stepping.train(folder, dims, tiny.tokens(4), lr=0.1, head="value", freeze=FROZEN)


@with_halves
def test_a_critic_trains_and_what_is_frozen_stays(tmp_path):
    """transformers has no such head in this family: its decoder and a linear layer on it are the reference."""
    hf = CASES["nemotron_h-no-experts"]
    model, score = tiny.random_model(hf), torch.nn.Linear(hf.hidden_size, 1, bias=False)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = {**on_disk(model, own), "score.weight": score.weight.detach().clone()}
    del before["lm_head.weight"]
    save(before, hf, tmp_path)
    loss = score(model.base_model(tiny.tokens(4)[:, :-1]).last_hidden_state).square().mean()
    loss.backward()
    grads = {n: parameter.grad for n, parameter in model.named_parameters() if parameter.grad is not None}
    grads = {**on_disk(model, grads), "score.weight": score.weight.grad}
    held = {name for name in grads if any(part in name for part in HELD)}
    for step in pool.run(4, critic_step, str(tmp_path)):
        assert step["loss"] is None or tiny.relative_error(step["loss"], loss.detach()) < 1e-5
        tiny.assert_near(step["grads"], {name: grads[name] for name in grads.keys() - held}, "gradients")
        tiny.assert_near(step["weights"], {name: before[name] - 0.1 * grads[name] for name in grads.keys() - held}, "")
        assert all(torch.equal(step["weights"][name], before[name]) for name in held)
        assert len(held) == 4


def recomputed(folder, options):
    """Runs in each worker: gradients for each way to recompute."""
    found = []
    dims = ParallelDims(tp=2, sp=True)
    for overrides in options:
        with stepping.mesh(dims):
            found.append(stepping.train(folder, dims, tiny.tokens(2), overrides=overrides)["grads"])
    return found


OWN = ("lfm2", "lfm3", "kimi_linear", "bailing_hybrid", "olmo_hybrid")


@pytest.mark.parametrize("name", zoo.params(("nemotron_h-narrow-experts", *OWN)))
def test_recompute_changes_nothing(tmp_path, name):
    modules = ["core_attn", "mlp", *(["moe"] if name in SPARSE else [])]
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    folder = str(tiny.random_checkpoint(zoo.cases()[name].hf, tmp_path))
    plain, *others = pool.run(2, recomputed, folder, [{}, FULL, selective])[0]
    for other in others:
        assert all(tiny.relative_error(other[name], plain[name]) < 1e-5 for name in plain)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PACKS = [({"cp": 2}, {}, "always"), ({"pp": 2}, {}, "in one stage"), ({"tp": 2, "sp": True}, FULL, "again")]
"""Meshes of two ranks, overrides, and when states run into each other by a mistake."""


def mistaken(when):
    """Let states of packed sequences leak into the next sequence: always, in the last stage, or only in recompute."""
    right = mixer.packed_lengths

    def wrong(*args):
        is_due = {"always": True, "in one stage": get_rank() == 1, "again": torch.is_grad_enabled(), "": False}[when]
        return [sum(right(*args))] if is_due else right(*args)

    return mock.patch.object(mixer, "packed_lengths", wrong)


def packed_steps(hf, cases, **options):
    """Runs in each worker: log-probs and gradients of rows of unequal lengths, for each mesh, overrides and mistake."""
    places, lengths = torch.arange(16), torch.tensor([16, 5, 2, 11])
    ids, mask = tiny.tokens(4, seq_len=16)[:, :16], (places < lengths[:, None]).long()
    weights, found = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)), []
    for sizes, overrides, when in cases:
        with stepping.mesh(dims := ParallelDims(**sizes)), mistaken(when):
            how = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
            chunks = build_model(hf, **how, overrides=overrides)
            learn = {"loss": lambda out, rows: (out.log_probs * weights[rows]).sum(1).mean(), **options}
            said = forward(stepping.wrap(chunks), ids, mask, **learn).log_probs
            found.append((said, stepping.gradients(chunks)))
    return found


@pytest.mark.parametrize("name", zoo.params(("falcon_h1", *OWN)))
def test_states_of_packed_sequences_do_not_run_into_each_other(name):
    """With CP, PP and recompute, log-probs and gradients equal the results of separate rows. A mistake would show: of
    each mixer in one way, and of the first one in all ways.
    """
    hf, size = zoo.cases()[name].hf, {"micro_batch_size": 2}
    (((expected, wanted),),) = pool.run(1, functools.partial(packed_steps, packed=False, **size), hf, [({}, {}, "")])
    packs = [pack for pack in PACKS if name != "olmo_hybrid" or "cp" not in pack[0] or DELTA_CONTEXT.is_installed]
    shown = len(packs) if name == "falcon_h1" else 1
    tried = [
        (*case, mistake)
        for number, (*case, when) in enumerate(packs)
        for mistake in (("", when) if number < shown else ("",))
    ]
    for ranks in pool.run(2, functools.partial(packed_steps, **size), hf, tried):
        for (*_, mistake), (said, grads) in zip(tried, ranks, strict=True):
            assert grads.keys() == wanted.keys()
            errors = [max(tiny.relative_error(grads[name], wanted[name]) for name in grads)]
            errors.append(float((said - expected).abs().max() / expected.std()) if mistake != "again" else errors[0])
            assert min(errors) > 1e-3 if mistake else max(errors) < 5e-5, (mistake, errors)


def built():
    """Run in each worker: the entries of a mixer in mcore's distributed checkpoint, and its initial values."""
    with stepping.mesh(ParallelDims(tp=2)):
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        (model,) = build_model(HF, dims=ParallelDims(tp=2), dtype=torch.float32, device="cpu", load_weights=False)
        mixer = model.decoder.layers[0].self_attention
        saved = mixer.sharded_state_dict(prefix="x.")
        parts = [part for entry in saved.values() for part in (entry.build() if hasattr(entry, "build") else [entry])]
        shapes = {part.key: tuple(part.global_shape) for part in parts if hasattr(part, "global_shape")}
        return shapes, mixer.A_log.detach(), mixer.dt_bias.detach(), mixer.D.detach()


@with_halves
def test_saved_and_drawn_as_mcores_own_mixer_is():
    """The decay is between 1 and 16, and time steps between 0.001 and 0.1. Each rank draws its own heads."""
    (shapes, first, steps_of_first, skip), (_, second, steps_of_second, _) = pool.run(2, built)
    for name, rows in {"z": 80, "x": 80, "B": 24, "C": 24, "dt": 8}.items():
        assert shapes[f"x.in_proj.weight.{name}"][-2:] == (rows, 48)
    for name, rows in {"x": 80, "B": 24, "C": 24}.items():
        assert shapes[f"x.conv1d.weight.{name}"][-3:] == (rows, 1, 3)
        assert shapes[f"x.conv1d.bias.{name}"][-1:] == (rows,)
    assert shapes["x.A_log"] == shapes["x.D"] == shapes["x.dt_bias"] == (8,)
    assert shapes["x.norm.weight"] == (80,)
    assert shapes["x.out_proj.weight"] == (48, 80)
    assert ((first.exp() >= 1) & (first.exp() <= 16)).all()
    drawn = torch.nn.functional.softplus(steps_of_first)
    assert ((drawn > 0.00099) & (drawn < 0.101)).all()
    assert (skip == 1).all()
    assert not torch.equal(first, second)
    assert not torch.equal(steps_of_first, steps_of_second)


@with_halves
def test_each_layer_has_the_half_that_the_config_names():
    layers = [layer.submodules for layer in to_layer_spec(HF, backend="torch").layer_specs]
    halves = [(each.self_attention is not IdentityOp, each.mlp is not IdentityOp) for each in layers]
    assert halves == [(True, False), (False, True), (True, False), (False, True)]
    assert layers[1].sharded_state_dict_keys_map == {}
    name = "decoder.layers.0.self_attention.in_proj.layer_norm_weight"  # as TransformerEngine has it
    assert canonical(name, Numbering((3,), ())) == "decoder.layers.3.input_layernorm.weight"


@with_halves
def test_refused():
    sizes = {"mamba_num_groups": 4, "mamba_num_heads": 8, "mamba_state_dim": 3}
    for tp, said in {3: "divide mamba_num_groups=4", 16: "divide mamba_num_heads=8", 8: "4 times mamba"}.items():
        with pytest.raises(MeshError, match=said):
            check_model(ParallelDims(tp=tp, sp=True), {"num_layers": 1, "layer_kinds": ("M",), **sizes})
    for name, field in {"nemotron_h": "layers_block_type", "granitemoehybrid": "layer_types"}.items():
        with pytest.raises(ConfigError, match=f"at most 4, the number of kinds .* Change {field}"):
            to_transformer_config(CASES[name], overrides={"num_layers": 5})
    with pytest.raises(ConfigError, match="moe_shared_expert_overlap must be False"):
        to_layer_spec(HF, backend="torch", overrides={"moe_shared_expert_overlap": True})
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        to_transformer_config(HF, overrides={"mtp_num_layers": 1})

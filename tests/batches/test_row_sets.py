"""A set of adapters for each row of a batch, against a run of the whole batch for each set."""

import re
from functools import partial
from operator import attrgetter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

import mcore_bridge as mb
from mcore_bridge.batches import row_sets
from mcore_bridge.batches.row_sets import TokenSets
from mcore_bridge.errors import BatchError, MappingError
from mcore_bridge.factory.modules.adapter import Adapter
from mcore_bridge.factory.modules.row_adapters import DispatchedTokens, RowAdapters
from tests import zoo
from tests.support import composites, experts, pool, seeing, stepping, tiny
from tests.support.bounds import HAS_AVX512
from tests.support.peft_models import by_name, fill, parameters

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SP = {"tp": 2, "sp": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS = ["math", "code", None, "math", "code"]
EXCHANGED = ["code", "math", None, "math", "code"]
OF_RANKS = [ROWS, [None, "math", None, "math", "math"]]
"""Replicas use different sets."""
CASES = {
    "qwen3": (
        DENSE,
        (
            {"tp": 2, "packed": False},
            {**SP, "overrides": FULL},
            {"pp": 2, "overrides": FULL},
            {"pp": 2, "vp": 2, "overrides": FULL},
            {"cp": 2},
            {**SP, "overrides": FULL, "dora": True},
            {**SP, "overrides": FULL, "dora": True, "dropout": 0.5},
            {"tp": 2, "dora": True, "dropout": 0.5},
        ),
    ),
    "qwen3_moe": (
        ("q_proj", *experts.KINDS, "o_proj"),
        (
            {"ep": 2},
            {"ep": 2, "overrides": {"moe_token_dispatcher_type": "allgather"}, "ranks": (4, 4)},
            {**SP, "etp": 2, "overrides": FULL},
            {**SP, "ep": 2, "etp": 1, "dropout": 0.5},
            {"pp": 2, "overrides": FULL},
        ),
    ),
    "deepseek_v3-dense": (LATENT, (SP,)),
    "nemotron_h-no-experts": (("in_proj", *DENSE[:4], "up_proj", "down_proj"), (SP,)),
}


SEEING = {
    "qwen3_vl": (
        ("visual.blocks.*.mlp.linear_fc2", "qkv", "proj", "q_proj", "deepstack_merger_list.*.linear_fc1"),
        ({**SP, "overrides": FULL, "dora": True, "dropout": 0.5}, {"cp": 2}, {}),
    ),
    "qwen2_5_vl": (("qkv", "merger.mlp.*", "v_proj"), ({"tp": 2, "packed": False}, {"pp": 2, "recompute": True})),
    "gemma3": (("fc1", "v_proj", "out_proj"), ({"pp": 2, "dora": True, "recompute": True}, SP)),
    "gemma4": (("o_proj", "linear", "embedding_projection"), ({"pp": 2},)),
}
"""Composites with adapters in the tower. "recompute": of the tower's layers."""
LAYOUT = [
    [3, (1, 4, 4), 4, (1, 2, 6), 5],
    [2, (1, 2, 2), 3],
    [1, (1, 4, 2), 9],
    [14],
    [2, (1, 4, 4), 6, (1, 2, 2), 3],
]
"""The images of each row: of three sets in the first microbatch, which has three rows."""
OWN = {"qwen3": partial(tiny.config, "qwen3"), "qwen3_moe": lambda: experts.HF}
"""The configs of cases that are not in the zoo."""


def batch_of(hf):
    ids = torch.arange(5 * 12).view(5, 12) * 7 % hf.vocab_size
    return ids, torch.arange(12) < torch.tensor([12, 7, 9, 3, 11])[:, None]


def batch_for(folder, hf):
    """The arguments of ``forward``. A composite has no ``hf`` here: its batch has images."""
    if hf is not None:
        return {**dict(zip(("input_ids", "attention_mask"), batch_of(hf), strict=True)), "micro_batch_size": 2}
    batch = seeing.batch_of(seeing.reference(folder), LAYOUT)
    return {**dict(zip(("input_ids", "attention_mask", "images"), batch, strict=True)), "micro_batch_size": 3}


def built(folder, dims, targets, overrides=None, *, vision="text_only", recompute=False, ranks=(3, 5), **options):
    """A model with two sets of other targets, and of other ranks and scales by default. None of the factors is zero."""
    models = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu", overrides=overrides, vision=vision)
    if recompute and hasattr(models[0], "vision"):
        models[0].vision.gradient_checkpointing_enable()
    for name, rank, of_set in zip(("math", "code"), ranks, (targets, targets[1:]), strict=True):
        fill(models, mb.add_adapters(models, rank=rank, alpha=4, targets=of_set, name=name, **options))
    return models


def grads_of(models):
    """The gradients of each set, which are then empty."""
    found = {}
    for name in ("math", "code"):
        mb.set_adapters(models, name)
        found |= {f"{name} {path}": grad for path, grad in by_name(models, attrgetter("grad")).items()}
        for parameter in parameters(models):
            parameter.grad = None
    return found


def apart(models, run, rows):
    """Log-probs and gradients of a run of the whole batch for each set, whose loss has the rows of this set alone."""
    whole, grads = {}, {}
    for name in ("math", "code", None):
        own = torch.tensor([each == name for each in rows])
        if name is None:
            with mb.without_adapters(models):
                found = run().log_probs
        else:
            mb.set_adapters(models, name)
            found = run(loss=lambda out, of, own=own: out.log_probs[own[of]].sum()).log_probs
            grads |= {key: grad for key, grad in grads_of(models).items() if key.startswith(name)}
        whole[name] = found
    return torch.stack([whole[name][row] for row, name in enumerate(rows)]), grads


def errors(found, expected):
    """The largest differences of log-probs and of gradients."""
    (logs, grads), (wanted, own) = found, expected
    assert grads.keys() == own.keys()
    assert all(grad is not None for grad in grads.values())
    of_grads = [
        float((grad - own[name]).abs().max() / own[name].abs().max().clamp(1e-6)) for name, grad in grads.items()
    ]
    return float((logs - wanted).abs().max() / wanted.abs().max()), max(of_grads)


def mixed(models, run, rows):
    out = run(adapters=rows, loss=lambda out, of: out.log_probs.sum())
    return out.log_probs, grads_of(models)


def next_to_it(self, *arguments, follow=DispatchedTokens.follow):
    """A mistake: experts use the set of the token before."""
    follow(self, *arguments)
    self.take(self._numbers.roll(1), self._counts)


def halved(self, hidden, signs=(1, -1, 0)):
    """Dropout that each part of a layer repeats in any run: by the sign of an element, or of no element."""
    if not self.drops():
        return [hidden]
    return [hidden * (hidden * sign >= 0) * 2 for sign in signs[: self.parts]]


def of_one_part(self, layer, ins, own, redone=RowAdapters._redone):
    """A mistake: in DoRA all parts have the product of the first part's input."""
    return redone(self, layer, [of_set[:1] * len(of_set) for of_set in ins], own)


def without_sets(self, number, in_tower=TokenSets.in_tower):
    """A mistake: images of some rows use the set of other rows."""
    return in_tower(self, max(0, number - 1))


def compared(folder, hf, targets, meshes):
    """Runs in each worker: for each mesh the errors; for some also the errors with a planted mistake."""
    said = []
    for sizes in meshes:
        sizes = dict(sizes)
        overrides, packed, dropout = sizes.pop("overrides", None), sizes.pop("packed", True), sizes.pop("dropout", None)
        options = {"dora": sizes.pop("dora", None), "dropout": dropout, "recompute": sizes.pop("recompute", False)}
        options |= {"vision": "text_only" if hf else "frozen", "ranks": sizes.pop("ranks", (3, 5))}
        dims = mb.ParallelDims(**sizes)
        with stepping.mesh(dims), mock.patch.object(Adapter, "inputs_of", halved):
            models = built(folder, dims, targets, overrides, **options)
            rows = OF_RANKS[dist.get_rank()] if sizes in ({"ep": 2}, {}) else ROWS
            run = partial(mb.forward, models, **batch_for(folder, hf), packed=packed)
            expected, wrong = apart(models, run, rows), None
            right = errors(found := mixed(models, run, rows), expected)
            if hf is None:
                with mock.patch.object(TokenSets, "in_tower", without_sets):
                    wrong = errors(mixed(models, run, rows), expected)
            elif dims.ep > 1:
                assert torch.equal(run(adapters=rows).log_probs, found[0])
                with mock.patch.object(DispatchedTokens, "follow", next_to_it):
                    wrong = errors(mixed(models, run, rows), expected)
            elif dims.cp > 1:
                wrong = errors(mixed(models, run, EXCHANGED), expected)
            elif dropout:
                with mock.patch.object(RowAdapters, "_redone", of_one_part):
                    wrong = errors(mixed(models, run, rows), expected)
            elif dims.pp > 1 and dims.vp == 1:  # a recompute that sees the rows of the last forward
                plain = {}
                with mock.patch.object(row_sets, "_states", lambda plain=plain: plain):
                    wrong = errors(mixed(models, run, rows), expected)
            said.append((right, wrong))
    return said


@pytest.mark.parametrize("case", CASES)
def test_each_row_goes_through_its_own_set(case, tmp_path):
    targets, meshes = CASES[case]
    if case not in OWN and not zoo.here([case]):
        pytest.skip("the installed releases have no such model")
    hf = OWN[case]() if case in OWN else zoo.cases()[case].hf
    tiny.random_checkpoint(hf, tmp_path)
    ranks = pool.run(2, compared, str(tmp_path), hf, targets, meshes)
    for mesh, results in zip(meshes, zip(*ranks, strict=True), strict=True):
        for logs, grads in (right for right, _ in results):
            is_same = HAS_AVX512 and not mesh.get("packed", True)  # without packing, all products are equal
            assert logs <= (0 if is_same else 1e-6), mesh
            assert grads <= 5e-6, mesh
        if planted := [wrong for _, wrong in results if wrong]:
            assert max(grads for _, grads in planted) > 0.1, f"{mesh}: the mistake is found"


@pytest.mark.parametrize("name", SEEING)
def test_images_of_each_row_go_through_its_own_set(name, tmp_path):
    if name not in composites.NAMES or "qwen3_5" not in composites.NAMES:
        pytest.skip("the installed transformers lacks it")
    targets, meshes = SEEING[name]
    for results in pool.run(2, compared, str(seeing.written(name, tmp_path)), None, targets, meshes):
        for mesh, (right, wrong) in zip(meshes, results, strict=True):
            assert max(right) <= seeing.BOUND, (mesh, right)
            assert max(wrong) > 1e-2, f"{mesh}: the mistake is found"


def dropped(folder):
    """Runs in one worker: gradients with dropout, with and without a recompute."""
    found = []
    with stepping.mesh(mb.ParallelDims()):
        for overrides in (None, FULL):
            models = built(folder, mb.ParallelDims(), DENSE, overrides, dropout=0.3)
            torch.manual_seed(3)
            model_parallel_cuda_manual_seed(3)
            run = partial(mb.forward, models, *batch_of(tiny.config("qwen3")), micro_batch_size=2)
            found.append(mixed(models, run, ROWS))
            get_cuda_rng_tracker().reset()
        models[0].eval()
        return errors(*found), errors(mixed(models, run, ROWS), found[0])


def test_a_recompute_drops_what_its_forward_dropped(tmp_path):
    tiny.random_checkpoint(tiny.config("qwen3"), tmp_path)
    ((same, other),) = pool.run(1, dropped, str(tmp_path))
    assert max(same) <= 1e-6
    assert min(other) > 1e-2


LEARNED = {
    "qwen3": (
        {**SP, "overrides": FULL},
        {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}},
        {"pp": 2, "vp": 2, "ddp": {"overlap_grad_reduce": True}},
        {"cp": 2},
    ),
    "qwen3_moe": ({"ep": 2}, {**SP, "etp": 2}),
    "qwen3_vl": ({"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}},),
}
STEPS = [OF_RANKS, [["math", None, None, None, "math"], [None] * 5]]
"""The sets of rows in two steps, on each replica. In the second step, a replica has no set, and one set has no rows."""


def trained(folder, hf, targets, dims, how, overrides, ddp):
    """What two steps leave of each set, each in its own DDP and distributed optimizer, and the log-probs after them."""
    models = built(folder, dims, targets, overrides, vision="text_only" if hf else "frozen")
    wrapped, optimizers, batch, replica = {}, {}, batch_for(folder, hf), 0
    if dims.dp(2) == 2:
        replica = dist.get_rank()
    for name in ("math", "code"):
        mb.set_adapters(models, name)
        wrapped[name] = stepping.wrap(models, use_distributed_optimizer=True, **ddp)
        late = {"overlap_param_gather": ddp.get("overlap_param_gather", False)}
        optimizers[name] = stepping.distributed_optimizer(wrapped[name], lr=0.1, adam_eps=0.01, **late)
    for of_replicas in STEPS:
        used, rows = [name for name in wrapped if any(name in own for own in of_replicas)], of_replicas[replica]
        for name in used:
            for model in wrapped[name]:
                model.zero_grad_buffer()
        if how != "apart":
            if of_replicas is STEPS[1]:
                models[0].config.finalize_model_grads_func = None  # then it is megatron-core's
            mb.forward(wrapped, **batch, adapters=rows, loss=sum_of(None))
        for name in used:
            mb.set_adapters(models, name)
            if how == "apart":
                syncs = [model.no_sync for model in wrapped[name]]
                models[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
                own = torch.tensor([each == name for each in rows])
                mb.forward(wrapped[name], **batch, loss=sum_of(own))
                models[0].config.no_sync_func = None
            assert not optimizers[name].prepare_grads()
            assert optimizers[name].step_with_ready_grads()
    after = mb.forward(models, **batch, adapters=STEPS[0][replica]).log_probs
    values = {}
    for name in wrapped:
        mb.set_adapters(models, name)
        parts = stepping.masters(models, optimizers[name])
        values |= {f"{name} {path}": own for path, own in by_name(models, parts.__getitem__).items()}
    return after, values


def sum_of(own):
    """The loss of the rows of one set; of all rows with None."""
    return lambda out, of: (out.log_probs if own is None else out.log_probs[own[of]]).sum()


def first_of(chunks, wrapped, names, holders=row_sets._holders):
    """A mistake: the gradients of one set alone are completed."""
    return [of_chunk[:1] for of_chunk in holders(chunks, wrapped, names)]


def all_trained(folder, hf, targets, meshes):
    """Runs in each worker: for each mesh the errors against steps of each set apart; with several replicas also with a
    planted mistake.
    """
    said = []
    for sizes in meshes:
        sizes = dict(sizes)
        overrides, ddp = sizes.pop("overrides", None), sizes.pop("ddp", {})
        dims = mb.ParallelDims(**sizes)
        with stepping.mesh(dims):
            after = partial(trained, folder, hf, targets, dims, overrides=overrides)
            expected = after("apart", ddp=ddp)
            right, wrong = errors(after("together", ddp=ddp), expected), None
            if dims.dp(2) * dims.cp > 1:
                with mock.patch.object(row_sets, "_holders", first_of):
                    wrong = errors(after("together", ddp={}), expected)
            said.append((right, wrong))
    return said


@pytest.mark.parametrize("case", LEARNED)
def test_sets_in_one_batch_train_as_each_set_does_apart(case, tmp_path):
    if case in SEEING and (case not in composites.NAMES or "qwen3_5" not in composites.NAMES):
        pytest.skip("the installed transformers lacks it")
    hf = OWN[case]() if case in OWN else None
    targets = (CASES if hf else SEEING)[case][0]
    if hf:
        tiny.random_checkpoint(hf, tmp_path)
    else:
        seeing.written(case, tmp_path)
    for said in pool.run(2, all_trained, str(tmp_path), hf, targets, LEARNED[case]):
        for mesh, (right, wrong) in zip(LEARNED[case], said, strict=True):
            assert max(right) <= 1e-5, mesh
            assert wrong is None or max(wrong) > 1e-2, f"{mesh}: the mistake is found"


def refused(folder):
    """Runs in each of two workers: what each refusal says."""
    said = {}

    def refuse(what, models, rows, hf=None, kind=BatchError, **options):
        with pytest.raises(kind) as caught:
            mb.forward(models, *batch_of(hf or tiny.config("qwen3")), adapters=rows, **options)
        said[what] = str(caught.value)

    learn = {"loss": lambda out, of: out.log_probs.sum()}
    with stepping.mesh(mb.ParallelDims(tp=2)):
        models = built(folder, mb.ParallelDims(tp=2), DENSE)
        refuse("one name", models, "math")
        refuse("all at once", models, ["maths", "code", None])
        refuse("other rows", models, EXCHANGED if dist.get_rank() else ROWS)
        refuse("some ranks", models, ROWS if dist.get_rank() else None)
        refuse("no set", models, [None] * 5, **learn)
        with mb.without_adapters(models):
            refuse("off", models, ROWS)
        run = partial(mb.forward, *[models, *batch_of(tiny.config("qwen3"))])
        _, grads = mixed(models, run, ROWS)
        mb.set_adapters(models, "math")
        wrapped = stepping.wrap(models)
        refuse("ddp", models, ROWS, **learn)
        refuse("other ddp", {"code": wrapped, "math": models, "poems": wrapped}, ROWS, **learn)
        refuse("no rows", {"math": wrapped}, None)
        refuse("no models", {}, ROWS, kind=MappingError)
        mb.forward(wrapped, *batch_of(tiny.config("qwen3")), adapters=ROWS, **learn)  # the other set has no DDP
        assert models[0].bridge_adapter_sets.in_use == "math"
        for parameter in parameters(models):
            parameter.grad = parameter.main_grad
        found = grads_of(models)
        assert all(torch.allclose(found[name], grad, atol=1e-5) and grad.any() for name, grad in grads.items())
        assert [*models[0].bridge_adapter_sets.by_name] == ["math", "code"]
    with stepping.mesh(mb.ParallelDims()):
        models = mb.build_model(experts.HF, dtype=torch.float32, device="cpu", load_weights=False)
        refuse("none there", models, ROWS, experts.HF)
        mb.add_adapters(models, rank=1, alpha=1, targets=["experts.down_proj"], expert_format="fused", name="math")
        models[0].config.moe_token_dispatcher_type = "flex"  # its kernels need a GPU
        refuse("experts", models, ["math"] * 5, experts.HF)
    return said


REFUSED = {
    "one name": r"adapters must be a list with the name of a set or None for each row, .* found 'math': pass a list",
    "all at once": r"one entry for each of 5 rows, found 3.*\['math', 'code'\], found \['maths'\]: call add_ad",
    "other rows": r"adapters of rows .*rank 1",
    "some ranks": r"adapters.*rank 1",
    "no set": "must name a set for a row, since a loss is given, found None for all",
    "off": "given in a block of without_adapters: leave out one",
    "ddp": r"DDP or FSDP has gradients of \['math'\].* pass a mapping .*\{'math': \[ddp\]\}\. For FSDP, call",
    "other ddp": r"wrappers of their sets, .*'code'\], found \['poems'\]: leave them out; .*of \['math'\], and this",
    "no rows": "may be a mapping with adapters= alone, found adapters=None: pass the chunks",
    "no models": "no models given; expected this rank's chunks",
    "none there": r"sets of the models, \[\], found \['code', 'math'\]: call add_adapters",
    "experts": r"adapters of routed experts with moe_token_dispatcher_type='flex', found .* in \['math'\]: call set_",
}


def test_what_cannot_have_sets_by_row_is_refused_on_all_ranks(tmp_path):
    tiny.random_checkpoint(tiny.config("qwen3"), tmp_path)
    for said in pool.run(2, refused, str(tmp_path)):
        assert said.keys() == REFUSED.keys()
        for what, message in REFUSED.items():
            assert re.search(message, said[what]), f"{what}: {said[what]}"

"""An export that fails on one rank fails on all ranks, at any step; and yielded tensors belong to the caller."""

import contextlib
import os
import pickle
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError, ExportError
from mcore_bridge.rules.mapping import respelled
from mcore_bridge.weights import agreement
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.gather import assemble_plan
from mcore_bridge.weights.plan.stream import cut
from mcore_bridge.weights.transfer.windows import Windows
from tests.support import mtp_checkpoints, pool, stepping
from tests.support.exports import BUCKET, assert_exact, built
from tests.support.failing_ranks import only_on_1
from tests.support.sparse_models import sparse


def export_while(name, after, dtype):
    models, state = built()
    with only_on_1(name, after), pytest.raises(BridgeError) as refused:
        mb.to_hf_state_dict(models, dtype=dtype)
    assert_exact(mb.to_hf_state_dict(models), state)
    return str(refused.value)


THE_ONE = r"embedding\.word_embeddings\.weight to decoder\.layers\.2\.self_attention\.linear_proj\.weight"
"""The first and the last entry of both stages in the only message."""


@pytest.mark.parametrize(
    ("name", "after", "message"),
    [
        (
            "mcore_bridge.weights.transfer.endpoints.Outputs._allocated",
            0,
            rf"RuntimeError in the message of {THE_ONE}: out of",
        ),
        ("mcore_bridge.weights.transfer.copier.CopyTable.run", 0, "rank 1 of the group: RuntimeError: out of memory"),
        ("mcore_bridge.weights.transfer.copier.CopyTable.run", 1, "out of memory"),
        ("mcore_bridge.weights.agreement.provenance_on", 0, "RuntimeError: out of memory"),
        (
            "mcore_bridge.weights.source.weight_format.wanted_dtype",
            3,
            "RuntimeError in the message of .*: out of memory",
        ),
    ],
)
def test_all_ranks_raise(name, after, message):
    found = pool.run(4, export_while, name, after, torch.bfloat16 if "dtype" in name else None, timeout=60)
    assert all(re.search(message, each) for each in found), found


def fail_with_the_first_tensor(copy):
    """The number of messages, and the numbers of the first message that completes a tensor and of the last one
    yielded.
    """
    models, _ = built(mb.ParallelDims(tp=4, sp=True))
    messages = agreement.agree_on_plan(models, None, "lm", bucket_bytes=BUCKET).program.plan.messages
    numbers, taken = [message.number for message in messages for _ in message.done], []
    with (
        only_on_1("mcore_bridge.weights.source.weight_format.wanted_dtype"),
        pytest.raises(ExportError, match="rank 1 of the group: RuntimeError in the"),
    ):
        taken.extend(mb.iter_hf_weights(models, dtype=torch.bfloat16, bucket_bytes=BUCKET, copy=copy))
    return len(messages), numbers[0], numbers[: len(taken)]


@pytest.mark.parametrize("copy", [True, False])
def test_a_failure_is_heard_three_messages_later(copy):
    for rank, (count, first, taken) in enumerate(pool.run(4, fail_with_the_first_tensor, copy, timeout=60)):
        assert count > 10
        assert not taken if rank == 1 else max(taken) < first + 3


def plan_otherwise_on_1(name, result, dims, targets):
    models, state = built(dims)
    target = targets[dist.get_rank() % len(targets)]
    here = mock.patch(name, result) if dist.get_rank() == 1 else contextlib.nullcontext()
    with here, mock.patch.object(Windows, "send") as send:
        with pytest.raises(
            Exception, match=r"plans that do not fit together|out of memory|by different rules"
        ) as refused:
            mb.to_hf_state_dict(models, target=target, bucket_bytes=1 << 16)
        send.assert_not_called()
    assert_exact(mb.to_hf_state_dict(models, bucket_bytes=1 << 16), state)
    return str(refused.value)


def all_of_it(*arguments):
    return 1 << 60


def one_row_further(*arguments, **named):
    """Plan windows of equal sizes with other contents."""
    return tuple(tuple(run._replace(first=run.first + 1) for run in runs) for runs in cut(*arguments, **named))


def of_another_size(wanted, streams, needed, rooms):
    return assemble_plan(wanted, streams, needed, [room + 1 for room in rooms])


def for_each_other(*arguments, **named):
    *others, targets = arguments
    return plan_targets(*others, [targets[place ^ 1] for place in range(len(targets))], **named)


def of_other_names(*arguments):
    provenance = provenance_on(*arguments)
    return replace(provenance, rules=respelled(provenance.rules, (("model.", "language_model."),)))


def unable(*arguments, **named):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("name", "result", "dims", "targets"),
    [
        (
            "mcore_bridge.weights.plan.all_to_all.ReceiverPlan.open_bytes",
            all_of_it,
            mb.ParallelDims(tp=2, pp=2),
            mb.engine_ranks(tp=2),
        ),
        ("mcore_bridge.weights.agreement.plan_targets", for_each_other, mb.ParallelDims(tp=4), mb.engine_ranks(tp=2)),
        ("mcore_bridge.weights.plan.gather.window_of", all_of_it, mb.ParallelDims(tp=2, pp=2), ["everything"]),
        ("mcore_bridge.weights.plan.gather.cut", one_row_further, mb.ParallelDims(tp=2, pp=2), ["everything"]),
        (
            "mcore_bridge.weights.plan.gather.assemble_plan",
            of_another_size,
            mb.ParallelDims(tp=2, pp=2),
            ["everything"],
        ),
        ("mcore_bridge.weights.agreement.provenance_on", of_other_names, mb.ParallelDims(tp=4), ["everything"]),
        ("mcore_bridge.weights.agreement.plan_export", unable, mb.ParallelDims(tp=2, pp=2), ["everything"]),
    ],
)
def test_nothing_is_sent_where_plans_do_not_fit(name, result, dims, targets):
    found = pool.run(4, plan_otherwise_on_1, name, result, dims, targets, timeout=60)
    assert ["out of memory" in each for each in found] == [False, result is unable, False, False]


def digest_on_most_ranks():
    models, _ = built()
    with (
        only_on_1("mcore_bridge.weights.manifest.digest"),
        pytest.raises(BridgeError, match="rank 1 of the group: RuntimeError: out of"),
    ):
        mb.manifest(models, digests=True)
    mb.manifest(models)


def test_a_digest_that_fails_on_one_rank_leaves_nobody_waiting():
    pool.run(4, digest_on_most_ranks, timeout=60)


def export_beside_a_frozen_stage():
    models, state = built(mb.ParallelDims(pp=2))
    if dist.get_rank() == 0:
        models[0].requires_grad_(False)
    assert_exact(mb.to_hf_state_dict(stepping.gathering_late(models)), state)


def test_a_stage_may_be_frozen_under_overlap_param_gather():
    pool.run(2, export_beside_a_frozen_stage, timeout=60)


WAYS = {"asks": "bucket_bytes must be", "moved": "moved before replicas", "loses": "no models given"}


def export_beside_a_replica_that_cannot(dims, hf, way):
    """The second of two replicas passes an invalid argument, or one of its ranks has moved a parameter or no models."""
    models, state = built(dims, hf)
    wrapped = stepping.gathering_late(models)
    in_second = dist.get_rank() // (dist.get_world_size() // 2)
    bucket_bytes = -1 if in_second and way == "asks" else None
    if way == "moved" and dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(models[0].parameters())
        parameter.data = parameter.data.clone()
    is_without = way == "loses" and dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(ExportError) as refused:
        mb.to_hf_state_dict([] if is_without else wrapped, bucket_bytes=bucket_bytes)
    if way != "moved":
        assert_exact(mb.to_hf_state_dict(wrapped), state)
    return str(refused.value)


@pytest.mark.parametrize(("way", "message"), WAYS.items())
@pytest.mark.parametrize(
    ("dims", "hf"), [(mb.ParallelDims(tp=2), None), (mb.ParallelDims(ep=2), sparse(2))], ids=["TP2", "EP2"]
)
def test_a_replica_that_cannot_export_leaves_no_other_waiting_to_gather(dims, hf, way, message):
    found = pool.run(4, export_beside_a_replica_that_cannot, dims, hf, way, timeout=60)
    assert all("another replica" in each for each in found[:2])
    assert all(message in each for each in found[2:])


def pickled():
    models, state = built(mb.ParallelDims(tp=2))
    exported = mb.to_hf_state_dict(models)
    return len(pickle.dumps(exported)) / sum(tensor.nbytes for tensor in state.values())


def test_tensors_are_pickled_without_their_neighbours():
    assert max(pool.run(2, pickled)) < 2


def zero_what_came():
    hf = mtp_checkpoints.config("deepseek_v3")
    state = mtp_checkpoints.published(hf)
    models, _ = built(mb.ParallelDims(tp=2), hf, load_weights=state, overrides={"mtp_num_layers": 1})
    for name, tensor in mb.iter_hf_weights(models):
        assert torch.equal(tensor, state[name]), name
        tensor.zero_()


def test_who_writes_to_a_tensor_writes_to_no_other_name_of_it():
    pool.run(2, zero_what_came)


def exports_of_two_kinds():
    """Rank 0 always passes one target, and the other rank changes its target."""
    models, _ = built(mb.ParallelDims(tp=2))
    with mock.patch.object(agreement, "_planned", wraps=agreement._planned) as planned:
        for number in range(6):
            target = "nothing" if dist.get_rank() and number % 2 else "everything"
            mb.to_hf_state_dict(models, target=target)
    return planned.call_count


def test_a_plan_is_found_again_by_ranks_that_ask_for_the_same_in_two_of_them():
    assert pool.run(2, exports_of_two_kinds) == [2, 2]


def save_through_a_link(folder):
    models, state = built(mb.ParallelDims(tp=2))
    mb.save_hf_checkpoint(models, os.path.join(folder, "latest"))
    return state


def test_a_link_leads_to_what_is_saved_and_only_what_died_is_removed(tmp_path):
    (tmp_path / "step_100").mkdir()
    (tmp_path / "latest").symlink_to("step_100")
    dead, other = tmp_path / "step_100" / ".mcore_bridge.0123abcd", tmp_path / ".mcore_bridge.0123abcd"
    for folder in (dead, other):
        (folder / "new").mkdir(parents=True)
    pool.run(2, save_through_a_link, str(tmp_path))
    assert (tmp_path / "latest").is_symlink()
    assert (
        mb.Manifest.from_folder(tmp_path / "step_100").differences(mb.Manifest.from_folder(tmp_path / "latest")) == ()
    )
    assert sorted(os.listdir(tmp_path)) == [other.name, "latest", "step_100"]
    assert not any(name.startswith(".") for name in os.listdir(tmp_path / "step_100"))

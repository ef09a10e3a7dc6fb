"""Exports over real gloo processes: equal bits on every rank, and no rank waits forever if another stops or fails."""

import itertools
import re
from contextlib import closing
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import ExportError, MappingError, grouped_by_rank
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.manifest import digest
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.transfer import collectives
from mcore_bridge.weights.transfer.windows import Windows
from tests.support import pool, stepping
from tests.support.exports import BUCKET, MESH, assert_exact, built
from tests.support.logs import messages_of
from tests.support.strategies import random_state, tiny


def export_exactly(dims, fields):
    models, state = built(dims, tiny("llama", **fields))
    exported = mb.to_hf_state_dict(models, bucket_bytes=BUCKET)
    assert_exact(exported, state)
    return list(exported)


@pytest.mark.parametrize(
    ("dims", "fields"),
    [
        (mb.ParallelDims(), {}),
        (mb.ParallelDims(tp=4), {"num_key_value_heads": 2, "vocab_size": 97}),
        (mb.ParallelDims(pp=2, vp=2), {"tie_word_embeddings": True}),
        (mb.ParallelDims(tp=2, cp=2), {"attention_bias": True}),
        (mb.ParallelDims(tp=2, pp=2, layout="E|ttttL"), {"tie_word_embeddings": True, "vocab_size": 101}),
    ],
    ids=str,
)
def test_every_rank_gets_every_tensor_in_the_same_order(dims, fields):
    world = max(2, dims.model_size)  # a replica of one rank runs as two replicas
    orders = pool.run(world, export_exactly, dims, fields)
    assert all(order == orders[0] for order in orders)


def abandon(stops):
    models, state = built()
    stop = stops[dist.get_rank()]
    with mock.patch.object(Windows, "send", autospec=True, side_effect=Windows.send) as send:
        with closing(mb.iter_hf_weights(models, bucket_bytes=BUCKET)) as pairs:
            taken = dict(itertools.islice(pairs, stop))
        num_sent = send.call_count
        for name, tensor in taken.items():
            assert torch.equal(tensor, state[name])
        again = mb.to_hf_state_dict(models, bucket_bytes=BUCKET)  # no old message is left in the groups
    assert_exact(again, state)
    num_messages = send.call_count - num_sent
    assert num_sent < num_messages if None not in stops else num_sent == num_messages, "who stops last ends it"
    return len(taken), len(state)


@pytest.mark.parametrize("stops", [(3, 3, 3, 3), (1, None, None, None), (1, 5, None, 11), (None, 2, 2, 2)], ids=str)
def test_a_rank_may_stop_early_and_nobody_waits(stops):
    for stop, (taken, total) in zip(stops, pool.run(4, abandon, stops, timeout=60), strict=True):
        assert taken == (total if stop is None else stop)


def abandon_without_closing():
    models, state = built()
    for index, _ in enumerate(mb.iter_hf_weights(models, bucket_bytes=BUCKET)):
        if index == 4 and dist.get_rank() == 1:
            break
    try:
        for index, _ in enumerate(mb.iter_hf_weights(models, bucket_bytes=BUCKET)):
            if index == 2:
                raise RuntimeError("the consumer failed")
    except RuntimeError:
        pass
    assert_exact(mb.to_hf_state_dict(models), state)


def test_breaking_out_of_the_loop_or_raising_in_it_is_stopping_early():
    pool.run(4, abandon_without_closing, timeout=60)


SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}


def borrow(dims, fields):
    """Without copies, a yielded tensor may be a view, which is right until the next one. Ranks may mix, stop early,
    fail.
    """
    models, state = built(dims, tiny("qwen3_moe", **fields))
    rank, lent, seen = dist.get_rank(), 0, set()
    for _ in range(2):
        for name, tensor in mb.iter_hf_weights(models, bucket_bytes=BUCKET, copy=False):
            assert torch.equal(tensor, state[name]), name
            lent += tensor.untyped_storage().nbytes() > 8 * tensor.nbytes
            seen.add(name)
        assert seen == state.keys()
    for name, tensor in mb.iter_hf_weights(models, bucket_bytes=BUCKET, copy=rank == 1):
        assert torch.equal(tensor, state[name]), name
    with closing(mb.iter_hf_weights(models, bucket_bytes=BUCKET, copy=rank == 2)) as pairs:
        next(pairs)
    pairs = mb.iter_hf_weights(models, bucket_bytes=1, copy=rank == 0)
    next(pairs)
    parameter = models[0].decoder.layers[-1].self_attention.linear_proj.weight
    if rank == 3:
        parameter.untyped_storage().resize_(0)
    with pytest.raises(ExportError, match=r"rank 3 of the group: .*linear_proj"):
        list(pairs)
    return lent


@pytest.mark.parametrize("dims", [mb.ParallelDims(ep=4), mb.ParallelDims(tp=2, pp=2, sp=True)])
def test_tensors_that_arrive_whole_may_be_lent(dims):
    assert min(pool.run(4, borrow, dims, SPARSE, timeout=60)) > 0


def fail_before(rank):
    models, state = built()
    parameter = models[0].decoder.layers[0].mlp.linear_fc1.weight
    if dist.get_rank() == rank:
        size = parameter.untyped_storage().nbytes()
        parameter.untyped_storage().resize_(0)
    try:
        mb.to_hf_state_dict(models)
    except ExportError as error:
        message = str(error)
    if dist.get_rank() == rank:
        parameter.untyped_storage().resize_(size)
        with torch.no_grad():
            parameter.zero_()
    assert mb.to_hf_state_dict(models).keys() == state.keys()
    return message


@pytest.mark.parametrize("rank", [0, 3])
def test_freed_storage_on_one_rank_raises_on_all_with_the_name(rank):
    for message in pool.run(4, fail_before, rank, timeout=60):
        assert f"rank {rank} " in message
        assert "mlp.linear_fc1.weight" in message
        assert "no storage" in message


class Quantized(torch.Tensor):
    """A parameter whose data is in other tensors, like a parameter in FP8."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        assert function is torch.ops.aten.detach.default
        return cls(arguments[0])


class Named(torch.Tensor):
    """A tensor with another name and separate memory."""


def refuse_quantized():
    """The errors of all functions that read values of a model, for a parameter without its own memory."""
    models, state = built(mb.ParallelDims())
    linear = models[0].decoder.layers[0].mlp.linear_fc1
    kept, linear.weight = linear.weight, torch.nn.Parameter(Quantized(linear.weight))
    for run in (mb.to_hf_state_dict, mb.manifest, lambda models: mb.load_hf_weights(models, state)):
        with pytest.raises(
            mb.BridgeError, match=r"linear_fc1\.weight is a Quantized, whose values are in other tensors"
        ):
            run(models)
    linear.weight = torch.nn.Parameter(kept.detach().as_subclass(Named))
    assert_exact(mb.to_hf_state_dict(models), state)


def test_a_parameter_that_stands_for_other_tensors_is_refused():
    pool.run(1, refuse_quantized)


def fail_amid(rank):
    """A parameter loses its storage while the export runs. When the storage is back, an equal plan yields all of the
    model.
    """
    models, state = built()
    weight = models[0].decoder.layers[-1].mlp.linear_fc2.weight.data
    kept, storage, message = weight.clone(), weight.untyped_storage(), "nothing raised"
    size = storage.nbytes()
    pairs = mb.iter_hf_weights(models, bucket_bytes=1)
    next(pairs)
    if dist.get_rank() == rank:
        storage.resize_(0)
    try:
        for _ in pairs:
            pass
    except ExportError as error:
        message = str(error)
    storage.resize_(size)
    weight.copy_(kept)
    with closing(mb.iter_hf_weights(models, bucket_bytes=1)) as pairs:  # ranks that stop early send
        taken = dict(itertools.islice(pairs, 1 if dist.get_rank() == rank else None))
    assert_exact(taken, {name: state[name] for name in taken})
    assert_exact(mb.to_hf_state_dict(models, bucket_bytes=1), state)
    return message


def fail_early():
    """The consumer on one rank fails at the first tensor: other ranks raise while most tensors are still to come."""
    models, state = built()
    pairs, taken = mb.iter_hf_weights(models, bucket_bytes=1), []

    def take():
        for pair in pairs:
            taken.append(pair)
            if dist.get_rank() == 1:
                pairs.throw(RuntimeError("no memory"))

    with pytest.raises(ExportError, match=r"rank 1 of the group: RuntimeError in the message of .*: no memory"):
        take()
    assert 0 < len(taken) < len(state) / 3


def test_a_failure_is_heard_of_with_the_next_messages():
    pool.run(4, fail_early, timeout=60)


def move_amid(rank):
    """A parameter is freed while the export runs, and gets other memory. Its old memory has other contents."""
    models, _ = built()
    pairs = mb.iter_hf_weights(models, bucket_bytes=1)
    next(pairs)
    if dist.get_rank() == rank:
        storage = models[0].decoder.layers[-1].mlp.linear_fc2.weight.untyped_storage()
        size, place = storage.nbytes(), storage.data_ptr()
        storage.resize_(0)
        taken = [torch.empty(size, dtype=torch.uint8)]
        storage.resize_(size)
        while storage.data_ptr() == place:
            taken.append(torch.empty(size, dtype=torch.uint8))
            storage.resize_(0)
            taken.append(torch.empty(size, dtype=torch.uint8))
            storage.resize_(size)
    with pytest.raises(ExportError, match=r"rank 1 of the group: .*linear_fc2\.weight was freed or moved"):
        list(pairs)


def test_a_parameter_that_moves_amid_the_export_is_seen():
    pool.run(4, move_amid, 1, timeout=60)


def test_a_failure_amid_the_export_reaches_every_rank_with_the_name():
    messages = pool.run(4, fail_amid, 2, timeout=60)
    assert len(set(messages)) == 1
    assert "rank 2 " in messages[0]
    assert "mlp.linear_fc2.weight" in messages[0]


class Call(NamedTuple):
    """A collective: its name, the ranks of its group, its tensors, and numbers such as sizes of splits and roots."""

    name: str
    group: tuple[int, ...]
    tensors: list[tuple[tuple[int, ...], torch.dtype]]
    numbers: list[int]


class Trace(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every collective that passes the dispatcher."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            names = [argument.name for argument in function._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            leaves = torch.utils._pytree.tree_leaves(args)
            tensors = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            numbers = [leaf for leaf in leaves if isinstance(leaf, int)]
            self.calls.append(Call(str(function), tuple(dist.get_process_group_ranks(group)), tensors, numbers))
        return function(*args, **(kwargs or {}))


MOE = tiny("qwen3_moe", vocab_size=97, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)


def traced(dims, sizes):
    models, state = built(dims, MOE if dims.ep > 1 else None)
    target = mb.engine_ranks(**sizes)[dist.get_rank()] if sizes else "everything"
    traces = []
    for _ in range(2):
        with Trace() as trace:
            found = mb.to_hf_state_dict(models, bucket_bytes=BUCKET, target=target)
        traces.append(trace.calls)
        if not sizes:
            assert_exact(found, state)
    return traces


def assert_alike(calls):
    """The windows that ranks send together. In an all-to-all, each rank receives its windows from the other ranks."""
    size = len(calls[0].group)
    if "alltoall" in calls[0].name:
        sent = [call.numbers[size : 2 * size] for call in calls]
        assert [call.numbers[:size] for call in calls] == [[*column] for column in zip(*sent, strict=True)]
        calls = [call._replace(tensors=[dtype for _, dtype in call.tensors], numbers=[]) for call in calls]
    assert all(call == calls[0] for call in calls)


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        (MESH, None),
        (mb.ParallelDims(tp=2, pp=2, vp=2), None),
        (mb.ParallelDims(pp=4, layout="Ett||tt|L"), None),
        (mb.ParallelDims(ep=4), None),
        (mb.ParallelDims(tp=2, ep=2, etp=2, sp=True), None),
        (mb.ParallelDims(tp=2, pp=2, ep=2, sp=True), {"tp": 4, "ep": 2}),
    ],
    ids=str,
)
def test_all_ranks_issue_the_same_collectives_and_a_second_export_exchanges_nothing(dims, sizes):
    traces = pool.run(4, traced, dims, sizes)
    for calls in (calls for each in zip(*traces, strict=True) for calls in zip(*each, strict=True)):
        assert_alike(calls)
    first, second = traces[0]
    assert len(second) < len(first)
    assert {call.group for call in (*first, *second)} == {(0, 1, 2, 3)}
    begin, windows, end = second[:2], second[2:-1], second[-1]
    for call in (*begin, end):  # the plan is right; all ranks have memory; all have come to the end
        assert call.name.startswith("c10d.allreduce_")
        (((size,), dtype),) = call.tensors
        assert size <= 6
        assert dtype == torch.int64
    kinds = ("alltoall_base",) if sizes else ("allgather_base", "broadcast")  # unequal windows over gloo
    assert len(windows) > 2
    for call in windows:
        assert any(kind in call.name for kind in kinds)
        assert {dtype for _, dtype in call.tensors} == {torch.uint8}


def on_their_way(lends):
    """For each yielded tensor, the number of its message, and the number of messages that have been sent before."""
    models, _ = built(mb.ParallelDims(tp=4, sp=True))
    messages = agree_on_plan(models, None, "lm", bucket_bytes=BUCKET).program.plan.messages
    numbers = [message.number for message in messages for _ in message.done]
    with Trace() as trace:
        pairs = mb.iter_hf_weights(models, bucket_bytes=BUCKET, copy=not lends)
        sent = [sum("allgather_base" in call.name for call in trace.calls) for _ in pairs]
    return list(zip(numbers, sent, strict=True)), len(messages)


@pytest.mark.parametrize("lends", [False, True])
def test_further_messages_are_on_their_way_while_tensors_are_given_out(lends):
    """Two messages are in flight, or one if yielded tensors are views of the memory for the next."""
    ahead = MESSAGES_IN_FLIGHT - lends
    for pairs, count in pool.run(4, on_their_way, lends):
        assert count > 10
        assert all(sent == min(number + 1 + ahead, count) for number, sent in pairs)


def by_stages(function, *arguments):
    """Treat four ranks as many ranks: windows go to a rank's column and then to its stage."""
    collectives.FLAT, kept = 0, collectives.FLAT
    try:
        with Trace() as trace:
            assert function(*arguments) != "nothing raised"
    finally:
        collectives.FLAT = kept
    names = [call for call in trace.calls if {dtype for _, dtype in call.tensors} == {torch.uint8}]
    return {call.group for call in names}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (export_exactly, (MESH, {})),
        (export_exactly, (mb.ParallelDims(tp=2, pp=2, vp=2, sp=True), {"num_hidden_layers": 8})),
        (export_exactly, (mb.ParallelDims(tp=2, pp=2, layout="Etttt|L"), {"vocab_size": 3000})),
        (abandon, ((3, 3, 3, 3),)),
        (abandon, ((1, 5, None, 11),)),
        (abandon_without_closing, ()),
        (borrow, (MESH, SPARSE)),
        (fail_amid, (2,)),
    ],
)
def test_among_many_ranks_windows_travel_by_stages(function, arguments):
    for rank, groups in enumerate(pool.run(4, by_stages, function, *arguments, timeout=60)):
        stage, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert {stage, column} <= groups


def begin_without_memory(rank):
    from mcore_bridge.weights.transfer import executor

    models, state = built()
    memory = executor.Memory
    if dist.get_rank() == rank:
        executor.Memory = None  # calling it raises
    try:
        mb.to_hf_state_dict(models)
    except ExportError as error:
        message = str(error)
    finally:
        executor.Memory = memory
    assert_exact(mb.to_hf_state_dict(models), state)
    return message


def test_a_rank_without_memory_for_messages_leaves_nobody_waiting():
    messages = pool.run(4, begin_without_memory, 1, timeout=60)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1 of the group: TypeError: ")


def read_headers_without_memory(rank):
    """One rank cannot read the headers of its second message at first."""
    from mcore_bridge.weights.transfer.windows import Windows

    models, state = built()
    read, numbers = Windows.read_headers, []

    def read_or_raise(windows):
        numbers.append(windows.number)
        if dist.get_rank() == rank and numbers.count(1) == 1 and windows.number == 1:
            raise MemoryError("no memory")
        read(windows)

    Windows.read_headers = read_or_raise
    with pytest.raises(ExportError) as raised:
        mb.to_hf_state_dict(models, bucket_bytes=BUCKET)
    Windows.read_headers = read
    assert_exact(mb.to_hf_state_dict(models), state)
    return str(raised.value)


def test_a_rank_that_cannot_read_headers_leaves_nobody_waiting():
    (message,) = {*pool.run(4, read_headers_without_memory, 1, timeout=60)}
    assert re.match(r"rank 1 of the group: MemoryError in the message of .*: no memory", message)


def change_and_export(change):
    models, state = built(mb.ParallelDims(tp=2, pp=2), load_weights=random_state(tiny("qwen3", vocab_size=97)))
    mb.to_hf_state_dict(models, bucket_bytes=BUCKET)
    change(models, state)
    cached = mb.to_hf_state_dict(models, bucket_bytes=BUCKET)
    from mcore_bridge.weights import agreement

    agreement._plans.clear()
    fresh = mb.to_hf_state_dict(models, bucket_bytes=BUCKET)
    assert cached.keys() == fresh.keys() == state.keys()
    for name in fresh:
        assert cached[name].dtype == fresh[name].dtype
        assert torch.equal(cached[name], fresh[name])
        assert torch.equal(cached[name], state[name].to(cached[name].dtype)), name


def step(models, state):
    for chunk in models:
        for parameter in chunk.parameters():
            parameter.data.mul_(-1)
    state.update({name: -tensor for name, tensor in state.items()})


def other_dtype_on_one_rank_only(models, state):
    if models[0].pre_process:  # only these ranks detect that the plan is stale; all must plan again
        models[0].embedding.word_embeddings.weight.data = models[0].embedding.word_embeddings.weight.data.double()


def other_dtype_of_a_layer(models, state):
    """Change the dtype of a layer, so that tensors of one shape have two dtypes."""
    models[0].decoder.layers[-1].double()


def reload(models, state):
    for chunk in models:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.clone()


def offload(models, state):
    """Free the storages and allocate others. The parameters remain the same objects."""
    for chunk in models:
        for parameter in chunk.parameters():
            kept, storage = parameter.detach().clone(), parameter.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            parameter.data.copy_(kept)


def regroup(models, state):
    """Process groups are replaced, as by trainers that destroy communicators to free memory."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.destroy_model_parallel()
    mb.ParallelDims(tp=2, pp=2).initialize(device="cpu")
    for chunk in models:
        chunk.pg_collection = ProcessGroupCollection.use_mpu_process_groups()


def adapt_and_take_away(models, state):
    """Add an adapter on one rank: all ranks raise until it is removed."""
    linear = next(module for name, module in models[0].named_modules() if name.endswith(".linear_proj"))
    if dist.get_rank() == 1:
        linear.lora_A = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(MappingError, match=r"no rule for .*linear_proj\.lora_A"):
        mb.to_hf_state_dict(models, bucket_bytes=BUCKET)
    if dist.get_rank() == 1:
        del linear.lora_A


@pytest.mark.parametrize(
    "change",
    [step, other_dtype_on_one_rank_only, other_dtype_of_a_layer, reload, offload, regroup, adapt_and_take_away],
    ids=lambda change: change.__name__,
)
def test_a_cached_plan_gives_what_a_fresh_one_gives(change):
    pool.run(4, change_and_export, change)


class Float16Module(torch.nn.Module):
    """A wrapper like mcore's, with the model at ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class WriteGuard(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises when anything writes to one of the guarded storages."""

    def __init__(self, tensors):
        super().__init__()
        self.guarded = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                assert value.untyped_storage().data_ptr() not in self.guarded, f"{function} writes to a parameter"
        return function(*args, **(kwargs or {}))


def export_thrice():
    models, state = built()
    wrapped = [Float16Module(Float16Module(chunk)) for chunk in models]
    parameters = [parameter for chunk in models for parameter in chunk.parameters()]
    before = [digest(parameter) for parameter in parameters]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    for _ in range(3):
        with WriteGuard(parameters):
            for name, tensor in mb.iter_hf_weights(wrapped, bucket_bytes=BUCKET):
                assert torch.is_grad_enabled()
                assert not tensor.requires_grad
                assert tensor.grad_fn is None
                assert tensor.is_contiguous()
                assert tensor.untyped_storage().data_ptr() not in storages
                assert torch.equal(tensor, state[name])
                tensor.zero_()  # it is the caller's own
    assert before == [digest(parameter) for parameter in parameters]


def test_an_export_writes_to_no_parameter_and_gives_tensors_of_the_callers_own():
    pool.run(4, export_thrice)
    pool.run(1, export_alone)


def export_alone():
    models, state = built(mb.ParallelDims())
    for _, tensor in mb.iter_hf_weights(models):
        assert not tensor.requires_grad
        tensor.zero_()
    assert_exact(mb.to_hf_state_dict(models), state)


def export_elsewhere_built():
    """A model that mcore built from its own spec, without modules or attributes of ours."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    hf = tiny("qwen3")
    dims = mb.ParallelDims(tp=2)
    dims.initialize(device="cpu")
    config = mb.to_transformer_config(hf, dims=dims, dtype=torch.float32, overrides={"use_cpu_initialization": True})
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(config, spec, **mb.to_gpt_arguments(hf, dims=dims))
    state = random_state(hf)
    with pytest.raises(LookupError, match=r"call adopt\(models, hf\)"):
        mb.load_hf_weights([model], state)
    mb.adopt(model, hf)
    mb.load_hf_weights([model], state)
    assert_exact(mb.to_hf_state_dict([model]), state)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        for parameter in model.parameters():
            if hasattr(parameter, attribute):
                delattr(parameter, attribute)
    quantizer = torch.nn.Module()  # as ModelOpt inserts it
    quantizer.register_buffer("_amax", torch.ones(()))
    model.decoder.layers[1].mlp.linear_fc1.weight_quantizer = quantizer
    assert_exact(mb.to_hf_state_dict([model]), state)


def test_models_that_somebody_else_built_and_without_mcores_attributes():
    pool.run(2, export_elsewhere_built)


def export_cast():
    models, state = built()
    bf16 = mb.to_hf_state_dict(models, dtype=torch.bfloat16)
    assert all(torch.equal(bf16[name], state[name].to(torch.bfloat16)) for name in state)
    mixed = {"model.norm.weight": torch.float32, "*.mlp.*": torch.float16, "*": torch.bfloat16}
    specs = mb.manifest(models, dtype=mixed)
    exported = mb.to_hf_state_dict(models, dtype=mixed)
    assert [(spec.name, spec.shape, spec.dtype) for spec in specs] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in exported.items()
    ]
    assert exported["model.norm.weight"].dtype == torch.float32
    assert exported["model.layers.2.mlp.up_proj.weight"].dtype == torch.float16
    assert exported["lm_head.weight"].dtype == torch.bfloat16
    for parameter in itertools.chain.from_iterable(model.parameters() for model in models):
        parameter.data.fill_(1e6)
    with messages_of() as messages:
        mb.to_hf_state_dict(models, dtype={"model.norm.weight": torch.float16, "*": torch.bfloat16})
    assert ["infinite in 1 tensors, such as ['model.norm.weight']" in message for message in messages] == [True]


def test_dtypes_on_request_with_exceptions_by_name():
    pool.run(4, export_cast)


def digests():
    models, state = built()
    found = mb.manifest(models, digests=True)
    assert {spec.name: spec.sha256 for spec in found} == {name: digest(tensor) for name, tensor in state.items()}
    assert [spec.name for spec in found] == [name for name, _ in mb.iter_hf_weights(models)]
    assert mb.Manifest.from_json(found.to_json()) == found
    return found


def test_digests_are_those_of_the_source_on_every_rank():
    found = pool.run(4, digests)
    assert all(manifest == found[0] for manifest in found)


def other_bucket_bytes():
    models, _ = built()
    with pytest.raises(ExportError, match=r"same bucket_bytes on every rank, found rank 0 .*bucket_bytes=1000; rank 1"):
        mb.to_hf_state_dict(models, bucket_bytes=1000 + dist.get_rank())


def test_ranks_that_ask_for_different_buckets_are_told():
    pool.run(4, other_bucket_bytes, timeout=60)


def test_what_ranks_say_is_said_once():
    assert grouped_by_rank(["", "a", "b", "a"]) == "ranks 1, 3 of the group: a; rank 2 of the group: b"
    assert grouped_by_rank(["a"] * 3) == "all 3 ranks of the group: a"
    assert grouped_by_rank(["a"] * 12 + [""]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more of the group: a"
    assert grouped_by_rank(["a"]) == "rank 0 of the group: a"
    assert not grouped_by_rank(["", ""])
    assert grouped_by_rank(["a", "a"], [4, 6]) == "ranks 4, 6 of the job: a"


def nonsense():
    models, _ = built()
    asked = [{"bucket_bytes": 0}, {"bucket_bytes": "1MB"}, {"dtype": torch.int8}, {"dtype": {"*": "float17"}}]
    for options in asked:
        here = options if dist.get_rank() == 1 else {}
        with pytest.raises(ExportError, match=r"rank 1 of the group: (bucket_bytes|dtype) must be .*, found"):
            mb.to_hf_state_dict(models, **here)


def test_nonsense_on_one_rank_raises_on_all():
    pool.run(4, nonsense, timeout=60)


def export_wrapped():
    """Exports from megatron-core's wrappers, before and after a step of training, and with new parameters on the
    CPU.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    models, state = built(dtype=torch.bfloat16)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    halves = [Float16Module(chunk.config, chunk) for chunk in models]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = [DistributedDataParallel(chunk.config, ddp, half) for chunk, half in zip(models, halves, strict=True)]
    assert_exact(mb.to_hf_state_dict(wrapped, bucket_bytes=BUCKET), state)
    mb.load_hf_weights(wrapped, {name: -tensor for name, tensor in state.items()})
    assert_exact(mb.to_hf_state_dict(models), {name: -tensor for name, tensor in state.items()})


def test_megatrons_own_wrappers_are_seen_through():
    pool.run(4, export_wrapped)


def export_what_replicas_have_yet_to_gather(unwrapped):
    """A step of a distributed optimizer changes a replica's share of the parameters. The next forward gathers the
    rest.
    """
    chunks, state = built(mb.ParallelDims(tp=2))
    wrapped = stepping.gathering_late(chunks)
    models = chunks if unwrapped else wrapped
    assert_exact(mb.to_hf_state_dict(models), state)
    for group in wrapped[0].bucket_groups:
        group.param_gather_dispatched = False  # as a backward does
        for bucket in group.buckets:
            shares = bucket.param_data.chunk(group.intra_distributed_optimizer_instance_size)
            shares[group.intra_distributed_optimizer_instance_rank].neg_()
    with pytest.raises(ExportError, match="have not gathered yet"):
        list(mb.iter_hf_shards(models))
    assert_exact(mb.to_hf_state_dict(models), {name: -tensor for name, tensor in state.items()})
    assert not any(group.param_gather_dispatched for group in wrapped[0].bucket_groups)  # from now on a step may follow
    for group in wrapped[0].bucket_groups:
        group.start_param_sync()  # in flight, as with overlap_param_gather_with_optimizer_step
        assert group.param_gather_handle is not None
    assert_exact(mb.to_hf_state_dict(models), {name: -tensor for name, tensor in state.items()})
    for group in wrapped[0].bucket_groups:
        assert group.param_gather_handle is None
        assert group.param_gather_dispatched  # the next forward need not gather
    assert list(mb.iter_hf_shards(models))
    if dist.get_rank() % 2:  # the other rank of the replica raises, too
        next(chunks[0].parameters()).data = next(chunks[0].parameters()).data.clone()
    wrapped[0].bucket_groups[0].param_gather_dispatched = False
    with pytest.raises(ExportError, match=r"moved before replicas had gathered|of another rank"):
        mb.to_hf_state_dict(models)


@pytest.mark.parametrize("unwrapped", [False, True])
def test_what_a_step_left_to_the_next_forward_is_gathered_first(unwrapped):
    pool.run(4, export_what_replicas_have_yet_to_gather, unwrapped)


class Unknown:
    """A mix-in, which makes a class that is in no table of classes."""


def export_unknown_classes():
    models, state = built()
    for chunk in models:
        for module in chunk.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.__class__ = type(f"Unknown{type(module).__name__}", (Unknown, type(module)), {})
    assert_exact(mb.to_hf_state_dict(models), state)


def test_classes_of_modules_do_not_matter():
    pool.run(4, export_unknown_classes)


def export_with_head(head, tied):
    hf = tiny("qwen2", num_labels=3, tie_word_embeddings=tied)
    dims = mb.ParallelDims(tp=4, pp=2)
    lm = random_state(hf)
    models, _ = built(dims, hf, head=head, load_weights=lm)
    exported = mb.to_hf_state_dict(models)
    rows = 1 if head == "value" else 3
    last = "score.2.weight" if head == "process_reward" else "score.weight"
    names = {"score.0.weight", "score.0.bias", "score.2.bias", last} if head == "process_reward" else {last}
    assert exported.keys() == lm.keys() - {"lm_head.weight"} | names
    assert exported[last].shape == (rows, hf.hidden_size)
    report = mb.load_hf_weights(models, lm)
    holds_head = any(chunk.post_process for chunk in models)
    assert {*report.initialised} == (names if holds_head else set())
    assert report.ignored == (() if tied else ("lm_head.weight",))
    generator = torch.Generator().manual_seed(9)
    scored = exported | {name: torch.randn(exported[name].shape, generator=generator) for name in sorted(names)}
    assert mb.load_hf_weights(models, scored).initialised == ()
    assert_exact(mb.to_hf_state_dict(models), scored)


@pytest.mark.parametrize("head", ["value", "classification", "process_reward"])
@pytest.mark.parametrize("tied", [True, False])
def test_heads_load_from_a_causal_lm_and_from_their_own_weights(head, tied):
    pool.run(8, export_with_head, head, tied)

"""Residuals of several streams (hyper-connections), through the slots of megatron-core's layer for norms and additions.

Between layers a hidden state is ``[s, b, n * hidden]``: n streams side by side, which are equal behind the embedding.
Before attention and before the MLP, a sum of the streams is read, and normed. Their output is added to each stream. The
weights of the sum and of the additions depend on the token, and ``Connection`` computes them. Before the final norm the
streams become one. So the same code serves every family with streams, and no code of a layer is repeated. With
``mhc_rank``, each stream is normed before it is read, and each of its elements has a gate (``LowRankConnection``).

An MTP layer also reads all streams, and writes such streams for the next MTP layer. So with MTP layers, the final norm
gives the streams before it, too: ``[s, b, (n + 1) * hidden]``, of which the output layer reads the end.

megatron-core 0.20 has such a module, whose fields (``enable_mhc_connections`` and others) our configs have, too. It has
another merge before the final norm, always mixes streams with each other, and has no MTP layers beside them. Its branch
for development has such layers, with ``e_proj`` and ``h_proj``, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, free_after_forward, norm_of, submodules_of
from mcore_bridge.factory.modules.latent import ReplicatedLinear
from mcore_bridge.factory.modules.torch_modules import Norm, placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def has_streams(config: Any) -> bool:
    """Whether the residual of a model with this config has several streams."""
    return bool(getattr(config, "enable_mhc_connections", False))


def adapt_streams(layer: Any, context: LayerContext) -> None:
    """Lets a layer read and write streams, if its model has them. Layers with one spec must run one after the other."""
    config, backend = context.config, context.backend
    if not has_streams(config):
        return
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        raise ConfigError(
            "recompute_modules must be without 'layernorm' in a model with several residual streams. Its norms also "
            "make the weights of the next addition, which uses them before they are recomputed. Remove 'layernorm'."
        )
    if backend == "te" and not hasattr(submodules_of(layer.mlp), "router"):  # its usual linear layer has a norm inside
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
    norm, of_attention, of_mlp = norm_behind(norm_of(backend, config), config), Weights(), Weights()
    layer.input_layernorm, layer.self_attn_bda = of_attention.reading(norm), of_attention.writing()
    layer.pre_mlp_layernorm, layer.mlp_bda = of_mlp.reading(norm), of_mlp.writing()


def norm_behind(norm: type, config: Any) -> type:
    """``norm``, or nothing if streams have norms of their own before they are read."""
    return norm if getattr(config, "mhc_rank", None) is None else Unnormed


class Unnormed(MegatronModule):
    """Nothing in the place of a norm. In a checkpoint, TP cuts its modules as they are cut by themselves."""

    def __init__(self, config: TransformerConfig, *sizes: int, **arguments: Any) -> None:
        super().__init__(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def begin_and_end_streams(chunk: GPTModel) -> None:
    """Give the decoder of the first stage equal streams, and leave streams out of what MTP layers give the next stage.

    A model has ``config.mhc_num_residual_streams`` of them.
    """
    if not has_streams(chunk.config):
        return
    if chunk.pre_process:
        chunk.decoder.register_forward_pre_hook(_spread, with_kwargs=True)
    if (mtp := getattr(chunk, "mtp", None)) is not None:
        mtp.register_forward_hook(_without_streams)


def _without_streams(mtp: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output[..., -mtp.config.hidden_size :].contiguous()  # megatron-core sends no views to other stages


def _spread(decoder: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = decoder.config.mhc_num_residual_streams
    hidden = inputs[0] if inputs else named["hidden_states"]
    streams = hidden.repeat(*(1,) * (hidden.dim() - 1), count)
    return ((streams, *inputs[1:]), named) if inputs else (inputs, {**named, "hidden_states": streams})


def merging(norm: type, config: TransformerConfig) -> type:
    """``norm`` as the final norm of a model, or of an MTP layer. It makes one hidden state of streams before it.

    With MTP layers, its output has the streams before this hidden state.
    """
    if not has_streams(config):
        return norm
    norm = norm_behind(norm, config)

    def merge(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (module.merge(inputs[0]),)

    def keep(module: Any, inputs: tuple[Tensor, ...]) -> None:
        module.streams = inputs[0]

    def join(module: Any, inputs: tuple[Tensor, ...], normed: Tensor) -> Tensor:
        return torch.cat((module.streams, normed), -1)

    class Merged:
        """``norm`` with a ``Merge``. The constructor returns the norm, like megatron-core's ``TENorm``."""

        def __new__(cls, config: TransformerConfig, *sizes: int, **arguments: Any) -> Any:
            module = norm(config, *sizes, **arguments)
            module.merge = _merge(config)
            if config.mtp_num_layers:
                module.register_forward_pre_hook(keep)
                module.register_forward_hook(join)
                free_after_forward(module, [module], streams=None)
            module.register_forward_pre_hook(merge)
            return module

    return Merged


class StreamsMtpLayer(MultiTokenPredictionLayer):
    """An MTP layer whose input and output are all streams, and behind them the hidden state of the output layer.

    The embedding of the next token is added to each stream. Both have a norm and a projection before.

    Args:
        config, submodules, pg_collection, arguments: as for megatron-core's layer.
        linear: the class of the projections.
    """

    def __init__(self, config: Any, submodules: Any, *, linear: Any, pg_collection: Any, **arguments: Any) -> None:
        super().__init__(config, submodules, pg_collection=pg_collection, **arguments)
        self.group = getattr(pg_collection, "tp", None)  # None in 0.16, whose functions find it
        options = {"config": config, "init_method": config.init_method, "gather_output": False, "bias": False}
        options |= {"skip_bias_add": False, "is_expert": False, "tp_group": self.group}
        size = config.hidden_size
        self.e_proj = linear(size, size, **options, tp_comm_buffer_name="mtp_e_proj")
        self.h_proj = linear(size, size, **options, tp_comm_buffer_name="mtp_h_proj")

    def _concat_embeddings(self, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        """Streams ``[s, b, n * hidden]``, from the input of the layer and an embedding ``[s, b, hidden]``."""
        count = self.config.mhc_num_residual_streams
        streams = apart(hidden_states, count + 1)[:, :, :-1].flatten(1, 2)
        of_streams, _ = self.h_proj(self.hnorm(streams))
        of_embedding, _ = self.e_proj(self.enorm(decoder_input))
        added = of_streams.unflatten(1, (-1, count)) + of_embedding[:, :, None]
        added = gather_from_tensor_model_parallel_region(added, group=self.group)
        if self.sequence_parallel:
            added = scatter_to_sequence_parallel_region(added, group=self.group)
        return added.flatten(2)


class Weights:
    """Carries the weights of an addition from the norm before it (see ``Connection``).

    A forward that succeeds leaves it empty.
    """

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor | None, Tensor | None] | None = None

    def reading(self, norm: type) -> type:
        """``norm`` of what its ``connection`` reads out of the streams. The weights of the addition stay here."""
        memory = self

        class Reading:
            """``norm`` with a ``Connection``. The constructor returns the norm, like megatron-core's ``TENorm``."""

            def __new__(cls, config: TransformerConfig, *sizes: int, **arguments: Any) -> Any:
                module = norm(config, *sizes, **arguments)
                module.connection = Connection(config) if norm is not Unnormed else LowRankConnection(config)
                module.register_forward_pre_hook(memory._read)
                return module

        return Reading

    def _read(self, norm: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        streams, added = inputs[0], norm.ngrams(inputs[0]) if hasattr(norm, "ngrams") else None
        hidden, weights, mixes = norm.connection(streams if added is None else streams + added)
        self.kept = (weights, mixes, added)
        return (hidden,)

    def writing(self) -> Callable[[bool, bool], Add]:
        """megatron-core's ``get_bias_dropout_add``, for streams and without a fused kernel."""

        def get_bias_dropout_add(training: bool, fused: bool) -> Add:
            def add(output_with_bias: tuple[Tensor, Tensor | None], streams: Tensor, probability: float) -> Tensor:
                output, bias = output_with_bias
                output = nn.functional.dropout(output if bias is None else output + bias, probability, training)
                return self._write(output, streams)

            return add

        return get_bias_dropout_add

    def _write(self, output: Tensor, streams: Tensor) -> Tensor:
        kept, self.kept = self.kept, None
        assert kept is not None
        weights, mixes, ngrams = kept
        before = apart(streams if ngrams is None else streams + ngrams, weights.size(-1)).float()
        mixed = before if mixes is None else mixes.transpose(-1, -2) @ before
        added = weights[..., None] * output.float()[..., None, :]
        return (mixed + added).to(streams.dtype).flatten(-2)


def apart(streams: Tensor, count: int) -> Tensor:
    """Streams ``[s, b, n * hidden]`` as ``[s, b, n, hidden]``."""
    return streams.unflatten(-1, (count, -1))


class _Gates(nn.Module):
    """Numbers for each token, from a projection of all streams, which are normed together. In fp32.

    Args:
        config: the config of the model.
        sizes: the number of gates of each kind. Each kind has a scale of its own.
        starts: the values of ``base`` for each kind, at first.
    """

    def __init__(self, config: Any, sizes: tuple[int, ...], starts: tuple[float, ...]) -> None:
        super().__init__()
        self.sizes, self.count, self.eps = sizes, config.mhc_num_residual_streams, config.layernorm_epsilon
        total = sum(sizes)
        self.fn = _whole(config, total, self.count * config.hidden_size)
        self.base = _whole(config, total)
        self.scale = _whole(config, len(sizes))
        parts = [torch.full((size,), start) for size, start in zip(sizes, starts, strict=True)]
        for parameter, start in ((self.base, torch.cat(parts)), (self.scale, torch.tensor(0.01))):
            parameter.start = start  # type: ignore[attr-defined]  # for MTP layers, which are drawn later
            if config.perform_initialization:
                parameter.detach().copy_(start)
        if config.perform_initialization:
            config.init_method(self.fn)

    def logits(self, streams: Tensor) -> list[Tensor]:
        """The logits of each kind, fp32 ``[s, b, gates]``, for streams ``[s, b, n * hidden]``."""
        exact = streams.float()
        mean_square = exact.square().mean(-1, keepdim=True)
        projected = nn.functional.linear(exact, self.fn.float()) * (mean_square + self.eps).rsqrt()
        parts, bases = projected.split(self.sizes, -1), self.base.float().split(self.sizes)
        kinds = zip(parts, self.scale.float(), bases, strict=True)
        return [part * scale + base for part, scale, base in kinds]

    def read(self, streams: Tensor, weights: Tensor) -> Tensor:
        """The sum of the streams with these weights, ``[s, b, hidden]``."""
        return (weights[..., None] * apart(streams, self.count)).sum(-2).to(streams.dtype)


class Connection(_Gates):
    """The weights by which attention or an MLP reads streams, and by which its output is added to each of them.

    With ``mhc_sinkhorn_iterations``, a matrix mixes the streams before the addition. Its columns and rows are divided
    by their sums so often, and then the epsilon is not added to the weights of the addition.
    """

    def __init__(self, config: Any) -> None:
        count, self.iterations = config.mhc_num_residual_streams, config.mhc_sinkhorn_iterations
        mixes = (count * count,) if self.iterations else ()
        super().__init__(config, (count, count, *mixes), (_even(count), 0.0, *(0.0 for _ in mixes)))
        self.magnitude, self.added = config.mhc_magnitude, config.mhc_epsilon

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is read, ``[s, b, hidden]``, the weights of the addition, fp32 ``[s, b, n]``, and of mixes, or None."""
        reads, writes, *mixes = self.logits(streams)
        read, weights = self.read(streams, reads.sigmoid() + self.added), self.magnitude * writes.sigmoid()
        if not mixes:
            return read, weights + self.added, None
        return read, weights, self._balanced(mixes[0].unflatten(-1, (self.count, self.count)))

    def _balanced(self, logits: Tensor) -> Tensor:
        """Matrices ``[s, b, n, n]`` whose rows and columns have nearly equal sums."""
        matrix = logits.softmax(-1) + self.added
        matrix = matrix / (matrix.sum(-2, keepdim=True) + self.added)
        for _ in range(self.iterations - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + self.added)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + self.added)
        return matrix


class Merge(_Gates):
    """One hidden state of all streams, behind the last layer."""

    def __init__(self, config: Any) -> None:
        count = config.mhc_num_residual_streams
        super().__init__(config, (count,), (_even(count),))
        self.added = config.mhc_epsilon

    def forward(self, streams: Tensor) -> Tensor:
        """``[s, b, hidden]`` from ``[s, b, n * hidden]``."""
        (logits,) = self.logits(streams)
        return self.read(streams, logits.sigmoid() + self.added)


class Mean(nn.Module):
    """The mean of all streams, behind the last layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count = config.mhc_num_residual_streams

    def forward(self, streams: Tensor) -> Tensor:
        """``[s, b, hidden]`` from ``[s, b, n * hidden]``."""
        return apart(streams, self.count).mean(-2)


class LowRankMerge(nn.Module):
    """One hidden state of all streams: a mean of normed streams, each element of which has a gate.

    A projection of low rank makes the gates of all normed streams. Each stream has a norm of its own.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count, all_streams = config.mhc_num_residual_streams, config.mhc_num_residual_streams * config.hidden_size
        self.norm = StreamNorm(config)
        self.linear_down = ReplicatedLinear(all_streams, config.mhc_rank, config)
        self.linear_up = ReplicatedLinear(config.mhc_rank, all_streams, config)

    def forward(self, streams: Tensor) -> Tensor:
        """``[s, b, hidden]`` from ``[s, b, n * hidden]``."""
        return self.read(self.norm(streams))

    def read(self, normed: Tensor) -> Tensor:
        """``[s, b, hidden]`` from normed streams ``[s, b, n * hidden]``."""
        down, _ = self.linear_down(normed)
        up, _ = self.linear_up(nn.functional.silu(down / self.count))
        return apart(up.sigmoid() * normed, self.count).mean(-2)


class LowRankConnection(LowRankMerge):
    """What attention or an MLP reads, as in ``LowRankMerge``, and the weights by which its output is added."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.magnitude = config.mhc_magnitude
        self.linear_write = ReplicatedLinear(self.count * config.hidden_size, self.count, config)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """As ``Connection``, without mixes."""
        normed = self.norm(streams)
        writes, _ = self.linear_write(normed)
        return self.read(normed), self.magnitude * (writes.float() / self.count).sigmoid(), None


class StreamNorm(Norm):
    """RMSNorm of each of several streams ``[..., n * hidden]``, with weights for all elements of all streams."""

    def __init__(self, config: Any) -> None:
        self.count: int = config.mhc_num_residual_streams
        super().__init__(config, self.count * config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        streams = apart(hidden, self.count)
        mean_square = streams.float().square().mean(-1, keepdim=True)
        return self.scaled(streams, mean_square, apart(self.weight, self.count)).flatten(-2)


def _merge(config: Any) -> nn.Module:
    if getattr(config, "mhc_merges_evenly", False):
        return Mean(config)
    return Merge(config) if getattr(config, "mhc_rank", None) is None else LowRankMerge(config)


def _even(count: int) -> float:
    """The logit of ``1 / count``."""
    return -math.log(max(count - 1, 1))


def _whole(config: Any, *sizes: int) -> nn.Parameter:
    """A parameter that every TP rank holds whole. With SP, ``finalize_model_grads`` sums its gradients over TP."""
    parameter = nn.Parameter(torch.empty(*sizes, **placement(config)))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter

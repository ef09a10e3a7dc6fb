"""Attention within chunks equals attention with an explicit mask: in rows, packed sequences and context parallelism."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from mcore_bridge.factory.modules import chunks
from mcore_bridge.factory.modules.backend import LayerContext
from mcore_bridge.factory.modules.chunks import ChunkedAttention, adapt_chunks, chunked
from mcore_bridge.factory.modules.torch_modules import CoreAttention, zigzag
from tests.support.module_settings import ALONE, settings

SEQ, CHUNK = 12, 5
CONFIG = settings(attention_chunks=[0, CHUNK])


def core(kind: Any = ChunkedAttention, mask_type: AttnMaskType = AttnMaskType.causal, **config: Any) -> Any:
    return kind(settings(**{**vars(CONFIG), **config}), 2, mask_type, "self", pg_collection=SimpleNamespace(cp=ALONE))


def inputs(rows: int = 2, length: int = SEQ) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, rows, heads, 8, generator=generator) for heads in (4, 2, 2)]


def by_mask(query: Tensor, key: Tensor, value: Tensor, first: list[int], last: list[int]) -> Tensor:
    """Plain attention with a mask that is made place by place; each row has tokens from ``first`` to ``last``."""
    hidden = torch.ones(len(first), 1, SEQ, SEQ, dtype=torch.bool)
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        for at in range(SEQ):
            chunk = range(begin + (at - begin) // CHUNK * CHUNK, at + 1)
            hidden[row, 0, at, [seen for seen in chunk if begin <= seen <= end]] = False
            hidden[row, 0, at, at] = False
    found: Tensor = core(CoreAttention, AttnMaskType.no_mask)(query, key, value, hidden[:, :, -query.size(0) :])
    return found


def test_rows_attend_as_a_mask_says() -> None:
    query, key, value = inputs()
    whole = by_mask(query, key, value, [0, 0], [SEQ - 1] * 2)
    torch.testing.assert_close(core()(query, key, value), whole)
    torch.testing.assert_close(core()(query[9:], key, value), whole[9:])  # queries after cached keys
    plain = core(CoreAttention)(query, key, value)
    torch.testing.assert_close(core(attention_chunks=[CHUNK, SEQ])(query, key, value), plain)
    assert not torch.allclose(plain[CHUNK:], whole[CHUNK:])


def test_chunks_of_padded_rows_begin_at_their_first_token() -> None:
    """As in transformers, padding on the left does not move the chunks of a prompt."""
    query, key, value = inputs()
    counting = torch.ones(2, SEQ, dtype=torch.long)
    counting[0, :3], counting[1, 10:] = 0, 0
    found = core()(query, key, value, counting)
    expected = by_mask(query, key, value, [3, 0], [SEQ - 1, 9])
    torch.testing.assert_close(found[3:, 0], expected[3:, 0])
    torch.testing.assert_close(found[:10, 1], expected[:10, 1])
    assert found.isfinite().all()
    alone = core()(*(tensor[3:, :1] for tensor in (query, key, value)))
    torch.testing.assert_close(found[3:, :1], alone)
    four_dims = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bool)
    four_dims[..., 0] = True
    found = core()(query, key, value, four_dims)
    assert torch.equal(found[CHUNK:], core()(query, key, value, four_dims & False)[CHUNK:])
    assert not torch.allclose(found[1:CHUNK], core()(query, key, value)[1:CHUNK])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_context_parallel_ranks_attend_as_one(num_ranks: int) -> None:
    query, key, value = inputs()
    whole = by_mask(query, key, value, [0, 0], [SEQ - 1] * 2).chunk(2 * num_ranks)
    for rank in range(num_ranks):
        own = zigzag(rank, num_ranks)
        mine = [torch.cat([tensor.chunk(2 * num_ranks)[place] for place in own]) for tensor in (query, key, value)]
        attention = core()
        attention.cp_group = SimpleNamespace(size=lambda: num_ranks, rank=lambda rank=rank: rank)
        with mock.patch.object(CoreAttention, "_gather", return_value=(key, value)):
            found = attention(*mine)
        torch.testing.assert_close(found, torch.cat([whole[place] for place in own]))


class Fused(nn.Module):
    """A stand-in for TransformerEngine's attention, which records its calls."""

    def __init__(self, config: Any, *places: Any, **more: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, *arguments: Any, packed_seq_params: Any = None, **more: Any) -> str:
        return "fused"


def test_kernels_take_what_lies_in_one_chunk_and_torch_takes_the_rest() -> None:
    either, mask_type = core(chunked(Fused)), AttnMaskType.causal
    assert not list(either.children())
    short, long = inputs(length=CHUNK), inputs(length=CHUNK + 1)
    assert either(*short, None, mask_type) == "fused"
    assert torch.equal(either(*long, None, mask_type), core()(*long))
    tokens = [tensor[:, 0] for tensor in inputs(1)]
    for starts, is_fused in (([0, 5, 10, 12], True), ([0, 6, 8, 12], False)):
        bounds = torch.tensor(starts)
        longest = int(bounds.diff().max())
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
        found = either(*tokens, None, mask_type, packed_seq_params=packed)
        if is_fused:
            assert found == "fused"
            continue
        parts = zip(*(tensor[:, None].split(bounds.diff().tolist()) for tensor in tokens), strict=True)
        torch.testing.assert_close(found, torch.cat([core()(*part) for part in parts])[:, 0])


def test_layers_have_what_their_number_says(caplog: pytest.LogCaptureFixture) -> None:
    chunks.say.cache_clear()
    for attention, expected in ((CoreAttention, ChunkedAttention), (Fused, chunked(Fused))):
        for number, kind in enumerate((attention, expected)):
            own = SimpleNamespace(core_attention=attention)
            layer = SimpleNamespace(self_attention=SimpleNamespace(submodules=own))
            adapt_chunks(layer, LayerContext(CONFIG, number, "torch"))
            assert own.core_attention is kind
    assert "no attention within chunks" in caplog.text

"""The replacement for attention that TransformerEngine lacks; attention of TransformerEngine is tested on GPUs."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, choose_backend, say
from mcore_bridge.factory.modules.norms import adapt_query_key_norms
from mcore_bridge.factory.modules.scores import ScoresCoreAttention, adapt_scores
from mcore_bridge.factory.modules.te_attention import lacking, with_sinks
from tests.support.module_settings import ALONE, settings

LAID_OUT = {
    "context_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "multi_latent_attention": False,
    "params_dtype": torch.bfloat16,
    "cp_comm_type": None,
    "hierarchical_context_parallel_sizes": None,
}
LEVELS = {
    "context_parallel_size": 4,
    "cp_comm_type": "a2a+p2p",
    "hierarchical_context_parallel_sizes": [2, 2],
}
NEIGHBOURS, RING = ({"hierarchical_context_parallel_sizes": sizes} for sizes in ([4, 1], [1, 4]))
LATENT = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize("is_installed", [True, False])
def test_models_on_gpus_have_it_where_it_is_installed(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_bridge.factory.modules.backend.has_transformer_engine", lambda: is_installed)
    chosen = [choose_backend("auto", device=torch.device(device)) for device in ("cuda", "cpu")]
    assert chosen == ["te" if is_installed else "torch", "torch"]


@pytest.mark.parametrize(
    ("changes", "windowed", "reason"),
    [
        ({}, True, ""),
        ({"context_parallel_size": 1, "params_dtype": torch.float32, "kv_channels": 7}, True, ""),
        ({"params_dtype": torch.float32}, False, "fp32"),
        ({"softmax_type": "learnable"}, False, "sinks"),
        ({"kv_channels": 260}, False, "heads of [260]"),
        ({"kv_channels": 260, **LATENT}, False, ""),
        ({**LATENT, "v_head_dim": 10}, False, "heads of [10, 192]"),
        ({**LATENT, "qk_head_dim": 12}, False, "heads of [76, 128]"),
        ({**LATENT, "qk_head_dim": 96}, False, "heads of [128, 160]"),
        ({**LATENT, "v_head_dim": 192}, False, ""),
        ({**LATENT, "v_head_dim": 64}, False, ""),
        ({"kv_channels": 192, "value_channels": 128}, False, ""),
        ({"kv_channels": 192, "value_channels": 128}, True, "with windows of narrow values"),
        ({"kv_channels": 192, "value_channels": 160}, False, "heads of [160, 192]"),
        ({"num_query_groups": 2}, True, "distributes 1 key heads over 2 ranks"),
        ({**LEVELS, "cp_comm_type": None}, True, "distributes 2 key heads over 4 ranks"),
        ({"num_query_groups": 2}, False, ""),
        ({"num_query_groups": 1}, True, "1 key heads"),
        ({"attention_dropout": 0.1}, True, "dropped-out"),
        ({"cp_comm_type": "all_gather"}, True, ""),
        ({"cp_comm_type": "p2p", "num_query_groups": 1}, False, ""),
        ({"cp_comm_type": "p2p"}, True, "with windows for cp_comm_type='p2p'"),
        ({**LEVELS}, False, ""),
        ({**LEVELS}, True, "with windows for cp_comm_type='a2a+p2p'"),
        ({**LEVELS, **LATENT}, False, ""),
        ({**LEVELS, **LATENT, **NEIGHBOURS}, False, "of different size for cp_comm_type='a2a'"),
        ({**LEVELS, **LATENT, **RING}, False, ""),
        ({**LEVELS, **NEIGHBOURS, "num_query_groups": 8}, True, ""),
        ({**LEVELS, **RING}, True, "with windows for cp_comm_type='p2p'"),
        ({**LATENT, "cp_comm_type": "all_gather"}, False, "of different size for cp_comm_type='all_gather'"),
        ({"cp_comm_type": "a2a", "context_parallel_size": 4}, False, "distributes 2 key heads over 4 ranks"),
        ({**LEVELS, "num_query_groups": 2}, False, "distributes 1 key heads over 2 ranks"),
    ],
)
def test_what_is_lacking_has_a_reason(changes: dict[str, Any], windowed: bool, reason: str) -> None:
    found = lacking(settings(**{**LAID_OUT, **changes}), windowed=windowed)
    assert reason in found if reason else not found


@pytest.mark.parametrize("cp_comm_type", ["allgather", ["p2p", "a2a"]])
def test_what_would_attend_wrongly_is_refused(cp_comm_type: Any) -> None:
    with pytest.raises(ConfigError, match="cp_comm_type must be one of"):
        lacking(settings(**{**LAID_OUT, "cp_comm_type": cp_comm_type}), windowed=False)


def test_two_levels_without_their_groups_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"needs groups of two levels, found none: .*\(hierarchical_context_parallel_sizes="
    ):
        lacking(settings(**{**LAID_OUT, "cp_comm_type": "a2a+p2p"}), windowed=False)


class Fused(torch.nn.Module):
    """Like TransformerEngine's attention: it has uninitialised sinks, and takes rows only."""

    def __init__(self, config: Any, *places: Any, **more: Any) -> None:
        super().__init__()
        self.softmax_offset = torch.nn.Parameter(torch.full((4,), torch.nan))

    def forward(self, query: Any, *arguments: Any, packed_seq_params: Any = None, **more: Any) -> str:
        assert packed_seq_params is None
        return "fused"


def test_sinks_of_packed_sequences_are_those_of_rows() -> None:
    config = settings(
        softmax_type="learnable",
        num_attention_heads=4,
        tensor_model_parallel_size=1,
        init_method=torch.nn.init.normal_,
    )
    places = 1, AttnMaskType.causal, "self"
    groups = SimpleNamespace(cp=ALONE)
    either: Any = with_sinks(Fused)(config, *places, cp_comm_type=None, pg_collection=groups)
    assert list(dict(either.named_parameters())) == ["softmax_offset"]
    assert either.softmax_offset.isfinite().all()
    query, key, value = (torch.randn(7, heads, 8) for heads in (4, 2, 2))
    mask = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}
    assert either(query[:, None], key[:, None], value[:, None], **mask) == "fused"
    starts = torch.tensor([0, 3, 7])
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    either = either.to(torch.float32)
    either.softmax_offset = torch.nn.Parameter(torch.randn(4))  # as for a model on the meta device
    found = either(query, key, value, **mask, packed_seq_params=packed)
    plain: Any = ScoresCoreAttention(config, *places, pg_collection=groups)
    plain.softmax_offset.data.copy_(either.softmax_offset)
    parts = [plain(*(each[a:b, None] for each in (query, key, value)), **mask) for a, b in ((0, 3), (3, 7))]
    torch.testing.assert_close(found, torch.cat(parts)[:, 0])
    found.sum().backward()
    assert either.softmax_offset.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("adapt", "config", "message"),
    [
        (adapt_scores, {"attention_softcap": 30.0, "softmax_type": "vanilla"}, "no attention with soft caps"),
        (adapt_query_key_norms, {"qk_norm_kind": "all_heads"}, "no norm over the heads of several ranks"),
    ],
    ids=["caps", "norms"],
)
def test_what_torch_stands_in_for_is_said_once(
    adapt: Callable[[Any, LayerContext], None], config: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    say.cache_clear()
    caplog.set_level(logging.WARNING, logger="mcore_bridge")  # the command line has raised the level of all loggers
    for backend in ("torch", "te", "te"):
        layer = SimpleNamespace(self_attention=SimpleNamespace(submodules=SimpleNamespace()))
        adapt(layer, LayerContext(SimpleNamespace(**config), 0, backend))
        assert len(caplog.records) == (backend == "te")
    assert message in caplog.text

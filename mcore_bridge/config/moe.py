"""Tables of routed and shared experts: how many, in which layers, and how the router scores and selects."""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count
from mcore_bridge.errors import ConfigError


def _sparse_step(hf: Hf) -> dict[str, object]:
    """Qwen: every ``decoder_sparse_step``-th layer has experts, but for those in ``mlp_only_layers``."""
    num_layers, step = count(hf, "num_hidden_layers"), count(hf, "decoder_sparse_step")
    dense = hf.get("mlp_only_layers") or ()
    assert isinstance(dense, list | tuple)
    has_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)]
    return {"moe_layer_freq": has_experts}


def _sparse_step_back(mcore: Mcore) -> dict[str, object]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, sparse in enumerate(layers_of(mcore)) if not sparse]}


def layers_of(mcore: Mcore) -> list[int]:
    """Which layers have experts, 1 for each that has, whatever the spelling of ``moe_layer_freq``."""
    frequency, num_layers = mcore["moe_layer_freq"], mcore["num_layers"]
    assert isinstance(num_layers, int)
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(num_layers)]
    assert isinstance(frequency, list)
    return frequency[:num_layers]


def _normalised(hf: Hf) -> dict[str, object]:
    """Softmax over the chosen logits is softmax over all, chosen and renormalised."""
    normalised = hf.get("norm_topk_prob", False)
    if normalised and hf.get("num_experts_per_tok") == 1:
        raise ConfigError(
            "norm_topk_prob must be False with num_experts_per_tok=1: the weight of the one expert would always be 1, "
            "which megatron-core refuses. Set it to False if the model was trained so."
        )
    return {"moe_router_pre_softmax": not normalised}


def _normalised_back(mcore: Mcore) -> dict[str, object]:
    return {"norm_topk_prob": not mcore["moe_router_pre_softmax"]}


def _expert_size(hf: Hf) -> dict[str, object]:
    size = count(hf, "intermediate_size")
    return {"ffn_hidden_size": size, "moe_ffn_hidden_size": size}


def _expert_size_back(mcore: Mcore) -> dict[str, object]:
    if mcore["ffn_hidden_size"] != mcore["moe_ffn_hidden_size"]:
        raise ConfigError(
            "ffn_hidden_size and moe_ffn_hidden_size must be equal: HF has one intermediate_size for both."
        )
    return {"intermediate_size": mcore["moe_ffn_hidden_size"]}


# fmt: off
SPARSE_STEP      = Derive(("decoder_sparse_step", "mlp_only_layers"), _sparse_step, _sparse_step_back)
NORMALISED       = Derive(("norm_topk_prob",), _normalised, _normalised_back)
ONE_SIZE         = Derive(("intermediate_size",), _expert_size, _expert_size_back)
# fmt: on

MOE: tuple[Field, ...] = (
    Map("num_experts", "num_moe_experts", aka=("num_local_experts", "n_routed_experts")),
    Map("num_experts_per_tok", "moe_router_topk"),
    Ignore(
        "the auxiliary loss is the trainer's: override moe_aux_loss_coeff and moe_router_load_balancing_type",
        ("router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux"),
    ),
    Require("router_jitter_noise", (0.0, None), "megatron-core adds its noise in another place"),
    Preset("moe_router_load_balancing_type", "none"),
    Preset("moe_aux_loss_coeff", 0.0),
)
"""Routed experts. Which layers have them, their size, and the router's scores are the architecture's own."""
SOFTMAX: tuple[Field, ...] = (
    Const("moe_router_score_function", "softmax"),
    Const("moe_router_enable_expert_bias", False),
)
"""The router's scores are a softmax."""
SOFTMAX_NORMALISED: tuple[Field, ...] = (*SOFTMAX, Const("moe_router_pre_softmax", False))
"""The same, with weights that add up to one."""
SOFTMAX_BY_CONFIG: tuple[Field, ...] = (*SOFTMAX, NORMALISED)
"""The same, with weights that do so where ``norm_topk_prob`` says so."""
NO_SHARED: tuple[Field, ...] = (Const("moe_shared_expert_intermediate_size", None),)
SHARED_GATED: tuple[Field, ...] = (
    Map("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Const("moe_shared_expert_gate", True),
)
"""A shared expert, weighted by a gate of its own."""

"""Config tables of routed and shared experts: their number, the layers that have them, and the router."""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count
from mcore_bridge.config.layer_kinds import MTP_COUNTS, layers_of
from mcore_bridge.config.tables import but, without
from mcore_bridge.errors import ConfigError


def _sparse_step(hf: Hf) -> dict[str, object]:
    """Qwen: every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    num_layers, step = count(hf, "num_hidden_layers"), count(hf, "decoder_sparse_step")
    dense = hf.get("mlp_only_layers") or ()
    assert isinstance(dense, list | tuple)
    has_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)]
    return {"moe_layer_freq": has_experts}


def _sparse_step_back(mcore: Mcore) -> dict[str, object]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, sparse in enumerate(layers_of(mcore)) if not sparse]}


def _dense_first(hf: Hf) -> dict[str, object]:
    """DeepSeek: dense layers first, then every ``moe_layer_freq``-th layer has experts."""
    dense, step = hf.get("first_k_dense_replace") or 0, hf.get("moe_layer_freq", 1)
    assert isinstance(dense, int)
    assert isinstance(step, int)
    layers = range(count(hf, "num_hidden_layers"))
    return {"moe_layer_freq": [int(layer >= dense and layer % step == 0) for layer in layers]}


def _dense_first_back(mcore: Mcore) -> dict[str, object]:
    layers = layers_of(mcore)
    dense = layers.index(1) if 1 in layers else len(layers)
    if not all(layers[dense:]):
        raise ConfigError(
            f"moe_layer_freq must have dense layers first, and then only sparse ones, found {layers}. Remove the "
            "override."
        )
    return {"first_k_dense_replace": dense}


def _dense_layers(hf: Hf) -> dict[str, object]:
    return _dense_first({**hf, "first_k_dense_replace": hf["num_dense_layers"]})


def _dense_layers_back(mcore: Mcore) -> dict[str, object]:
    return {"num_dense_layers": _dense_first_back(mcore)["first_k_dense_replace"]}


def _mlp_types(hf: Hf) -> dict[str, object]:
    kinds, layers = hf.get("mlp_layer_types"), range(count(hf, "num_hidden_layers"))
    if not isinstance(kinds, list) or len(kinds) != len(layers) or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            f"mlp_layer_types must have 'dense' or 'sparse' for each of {len(layers)} layers, found {kinds!r}."
        )
    dense = hf.get("first_k_dense_replace")
    if dense is not None and kinds != ["dense" if layer < dense else "sparse" for layer in layers]:  # type: ignore[operator]
        raise ConfigError(f"first_k_dense_replace={dense!r} and mlp_layer_types={kinds!r} must agree; remove one.")
    return {"moe_layer_freq": [int(kind == "sparse") for kind in kinds]}


def _mlp_types_back(mcore: Mcore) -> dict[str, object]:
    return {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in layers_of(mcore)]}


def shared_experts(name: str) -> Derive:
    """Shared experts: HF has ``name`` of them, each as large as a routed one; megatron-core has one large one."""

    def forward(hf: Hf) -> dict[str, object]:
        size = count(hf, "moe_intermediate_size")
        total = count(hf, name) * size if hf.get(name) else None
        return {"moe_ffn_hidden_size": size, "moe_shared_expert_intermediate_size": total}

    def backward(mcore: Mcore) -> dict[str, object]:
        size, total = mcore["moe_ffn_hidden_size"], mcore["moe_shared_expert_intermediate_size"] or 0
        assert isinstance(size, int)
        assert isinstance(total, int)
        if total % size:
            raise ConfigError(
                f"moe_shared_expert_intermediate_size={total} must be a multiple of {size}, as HF counts."
            )
        return {"moe_intermediate_size": size, name: total // size}

    return Derive((name, "moe_intermediate_size"), forward, backward)


def _groups(hf: Hf) -> dict[str, object]:
    groups, chosen = (count(hf, name, unset=1) for name in ("n_group", "topk_group"))
    if groups == chosen:  # so groups restrict nothing
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    topk = count(hf, "num_experts_per_tok")
    if topk != 2 * chosen:
        raise ConfigError(
            f"num_experts_per_tok={topk} must be twice topk_group={chosen} with n_group={groups}: HF ranks "
            "a group by its two best experts, megatron-core (moe_utils.py, group_limited_topk) by as many as it takes."
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def groups_back(mcore: Mcore) -> dict[str, object]:
    return {"n_group": mcore["moe_router_num_groups"] or 1, "topk_group": mcore["moe_router_group_topk"] or 1}


def _several_normalised(hf: Hf) -> dict[str, object]:
    experts = count(hf, "num_experts_per_tok")
    normalised = hf.get("norm_topk_prob", True)  # families without the field always normalise the weights
    if normalised is not (experts > 1):
        raise ConfigError(
            f"norm_topk_prob must be {experts > 1} with num_experts_per_tok={experts}, found {normalised!r}: "
            "with sigmoid scores, megatron-core normalises the weights of several experts, and never the weight of one."
        )
    return {}


def _several_normalised_back(mcore: Mcore) -> dict[str, object]:
    return {"norm_topk_prob": mcore["moe_router_topk"] != 1}


def _normalised(hf: Hf) -> dict[str, object]:
    """Normalise by a softmax over the chosen logits: it equals the renormalised softmax over all logits."""
    normalised = hf.get("norm_topk_prob", False)
    if normalised and hf.get("num_experts_per_tok") == 1:
        raise ConfigError(
            "norm_topk_prob must be False with num_experts_per_tok=1: the weight of the one expert would always be 1, "
            "which megatron-core refuses. Set it to False if the model was trained so."
        )
    return {"moe_router_pre_softmax": not normalised}


def _normalised_back(mcore: Mcore) -> dict[str, object]:
    return {"norm_topk_prob": not mcore["moe_router_pre_softmax"]}


def _quick_gelu(hf: Hf) -> dict[str, object]:
    from megatron.core.activations import quick_gelu

    return {"activation_func": quick_gelu}


def _quick_gelu_back(mcore: Mcore) -> dict[str, object]:
    if mcore["activation_func"] != _quick_gelu({})["activation_func"]:
        raise ConfigError(
            f"activation_func must be megatron-core's quick_gelu, found {mcore['activation_func']!r}. Remove the "
            "override."
        )
    return {}


def one_size(*names: str) -> Derive:
    """HF's ``intermediate_size`` is the value of each of these mcore fields, including the size of experts."""

    def forward(hf: Hf) -> dict[str, object]:
        return dict.fromkeys(names, count(hf, "intermediate_size"))

    def backward(mcore: Mcore) -> dict[str, object]:
        if len({mcore[name] for name in names}) > 1:
            raise ConfigError(
                f"{', '.join(names)} must be equal: HF has one intermediate_size for all. Remove overrides."
            )
        return {"intermediate_size": mcore["moe_ffn_hidden_size"]}

    return Derive(("intermediate_size",), forward, backward)


def number(hf_name: str, mcore_name: str, *aka: str) -> Derive:
    """A number that must be equal for all layers, although HF allows a list. ``aka`` are other field names."""

    def forward(hf: Hf) -> dict[str, object]:
        value = hf.get(hf_name)
        if isinstance(value, list) and len(value) >= (num_layers := count(hf, "num_hidden_layers")):
            values = value[:num_layers]
            value = values[0] if all(item == values[0] for item in values) else value
        return {mcore_name: count({hf_name: value}, hf_name)}

    lists = f"`{hf_name}` that differs between layers: megatron-core has one value for all layers"
    return Derive((hf_name, *aka), forward, lambda mcore: {hf_name: mcore[mcore_name]}, (lists,))


def _beside(hf: Hf) -> dict[str, object]:
    dense = count(hf, "intermediate_size")
    if not hf.get("enable_moe_block"):
        return {"num_moe_experts": None, "ffn_hidden_size": dense, "moe_shared_expert_intermediate_size": None}
    return {
        "num_moe_experts": count(hf, "num_experts"),
        "moe_router_topk": count(hf, "top_k_experts"),
        "moe_ffn_hidden_size": count(hf, "moe_intermediate_size"),
        **dict.fromkeys(("ffn_hidden_size", "moe_shared_expert_intermediate_size"), dense),
    }


def _beside_back(mcore: Mcore) -> dict[str, object]:
    dense, shared = mcore["ffn_hidden_size"], mcore["moe_shared_expert_intermediate_size"]
    if mcore["num_moe_experts"] is None:
        return {"enable_moe_block": False, "intermediate_size": dense}
    if shared != dense:
        raise ConfigError(
            f"moe_shared_expert_intermediate_size must be ffn_hidden_size={dense}, found {shared}: HF has one "
            "intermediate_size. Override both."
        )
    named = {"num_experts": "num_moe_experts", "top_k_experts": "moe_router_topk"}
    experts = {hf: mcore[name] for hf, name in {**named, "moe_intermediate_size": "moe_ffn_hidden_size"}.items()}
    return {"enable_moe_block": True, "intermediate_size": dense, **experts}


# fmt: off
SPARSE_STEP      = Derive(("decoder_sparse_step", "mlp_only_layers"), _sparse_step, _sparse_step_back)
NORMALISED       = Derive(("norm_topk_prob",), _normalised, _normalised_back, (
    "`norm_topk_prob=True` with one expert for a token: its weight would be 1, which megatron-core refuses",))
DENSE_FIRST      = Derive(("first_k_dense_replace", "moe_layer_freq"), _dense_first, _dense_first_back)
DENSE_LAYERS     = Derive(("num_dense_layers",), _dense_layers, _dense_layers_back)
MLP_TYPES        = Derive(("mlp_layer_types", "first_k_dense_replace"), _mlp_types, _mlp_types_back)
GROUPS           = Derive(("n_group", "topk_group"), _groups, groups_back, (
    "`n_group` above 1 unless `num_experts_per_tok` is twice `topk_group`: HF ranks a group by its two best experts, "
    "megatron-core by as many as it takes from each (moe_utils.py, group_limited_topk)",))
IF_SEVERAL       = Derive(("norm_topk_prob",), _several_normalised, _several_normalised_back, (
    "`norm_topk_prob=False` with several experts for a token, or True with one: megatron-core normalises the weights "
    "of sigmoid scores where there are several (moe_utils.py, topk_routing_with_score_function)",))
QUICK_GELU       = Derive((), _quick_gelu, _quick_gelu_back)
ONE_SIZE         = one_size("ffn_hidden_size", "moe_ffn_hidden_size")
# fmt: on

ROUTED: tuple[Field, ...] = (
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
"""Routed experts. The architecture adds which layers have them, their size, and the scores of the router."""
SOFTMAX: tuple[Field, ...] = (
    Const("moe_router_score_function", "softmax"),
    Const("moe_router_enable_expert_bias", False),
)
"""The router's scores are a softmax."""
SOFTMAX_NORMALISED: tuple[Field, ...] = (*SOFTMAX, Const("moe_router_pre_softmax", False))
"""``SOFTMAX`` with weights that add up to one."""
SOFTMAX_BY_CONFIG: tuple[Field, ...] = (*SOFTMAX, NORMALISED)
"""``SOFTMAX`` with weights that add up to one if ``norm_topk_prob`` is set."""
SIGMOID: tuple[Field, ...] = (
    IF_SEVERAL,
    Const("moe_router_score_function", "sigmoid"),
    Const("moe_router_enable_expert_bias", True),
    Const("moe_router_pre_softmax", False),
    Preset("moe_router_bias_update_rate", 0.0),
    Preset("moe_router_dtype", "fp32"),
)
"""The router's scores are sigmoids in fp32. A bias (a buffer) only changes which experts are chosen."""
_BESIDE = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size", "intermediate_size")
BESIDE_MLP: tuple[Field, ...] = (
    *but(without(ROUTED, "num_moe_experts", "moe_router_topk"), Derive(_BESIDE, _beside, _beside_back)),
    *SOFTMAX_NORMALISED,
    *(Const("experts_beside_mlp", True), Const("router_scales", True), Const("moe_shared_expert_gate", False)),
)
"""Routed experts beside a dense MLP, if ``enable_moe_block`` is set, in every layer."""
EXPERT_SIZE = Map("moe_intermediate_size", "moe_ffn_hidden_size")
SCALED = Map("routed_scaling_factor", "moe_router_topk_scaling_factor")
CLAMPED_GATE: tuple[Field, ...] = (
    QUICK_GELU,
    Const("glu_linear_offset", 1.0),
    Map("swiglu_limit", "activation_func_clamp_value", default=7.0),
    Require("swiglu_alpha", (1.702,), "megatron-core's quick_gelu has this constant"),
    Require(
        "hidden_act", ("silu",), "the experts of all published models have their own activation, which is none of these"
    ),
)
"""gpt-oss: ``(up + 1) * gate * sigmoid(1.702 * gate)``, with gate and up clamped to a limit."""
MTP_ON_REQUEST = Ignore("MTP layers are built on request: override mtp_num_layers", MTP_COUNTS)
"""Logits do not depend on MTP layers, so a model may have them or not."""
MTP_LIKE_FIRST: tuple[Field, ...] = (MTP_ON_REQUEST, Const("mtp_like_layer", 0))
"""``MTP_ON_REQUEST``, with the window, the rope and the MLP of the decoder's first layer."""
MTP_NEVER = Ignore("MTP layers are not built: their weights have no rules, and a save copies them", MTP_COUNTS)
NO_SHARED: tuple[Field, ...] = (Const("moe_shared_expert_intermediate_size", None),)
SHARED_BY_GATE: tuple[Field, ...] = (
    Map("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Const("moe_shared_expert_gate", True),
)
"""A shared expert whose output is multiplied by a gate."""

"""Families that megatron-core's ``GPTModel`` cannot express, each with the code that shows it.

In some cases a submodule of megatron-core's own layers would be enough, but nobody has written it yet. The
reason then says what the module must do.
"""

from mcore_bridge.architecture import Refusal

GPT = "megatron.core.models.gpt.GPTModel"
LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
CONFIG = "megatron.core.transformer.TransformerConfig"
ATTENTION = "megatron.core.transformer.attention.SelfAttention"
SCORES = "megatron.core.transformer.dot_product_attention.DotProductAttention"
ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
MLP = "megatron.core.transformer.mlp.MLP"
MAMBA = "megatron.core.models.mamba.MambaModel"
DELTA = "megatron.core.ssm.gated_delta_net.GatedDeltaNet"
SSM = "megatron.core.ssm"


def _because(reason: str, *where: str, **classes: str) -> tuple[Refusal, ...]:
    """A refusal for each family: its ``model_type``, and the part of its code in transformers that shows the reason."""
    return tuple(
        Refusal((name,), reason, (f"transformers.models.{name.removesuffix('_text')}.{seen}", *where))
        for name, seen in classes.items()
    )


# fmt: off
REFUSALS = (
    *_because(
        "the MLP has the same input as attention; megatron-core's MLP has that input plus the output of attention",
        LAYER,
        codegen="modeling_codegen.CodeGenBlock", cohere="modeling_cohere.CohereDecoderLayer",
        cohere2="modeling_cohere2.Cohere2DecoderLayer", cohere2_moe="modeling_cohere2_moe.Cohere2MoeDecoderLayer",
        falcon="modeling_falcon.FalconDecoderLayer", gpt_neox="modeling_gpt_neox.GPTNeoXLayer",
        gptj="modeling_gptj.GPTJBlock", phi="modeling_phi.PhiDecoderLayer",
    ),
    *_because(
        "positions are a bias of the scores (ALiBi); megatron-core has no such position embedding",
        GPT, SCORES,
        bloom="modeling_bloom.build_alibi_tensor", mpt="modeling_mpt.build_mpt_alibi_tensor",
    ),
    *_because(
        "layers are state spaces (Mamba), some or all; megatron-core has these in a MambaModel, not in a GPTModel",
        MAMBA, GPT,
        bamba="modeling_bamba.BambaMixer", falcon_h1="modeling_falcon_h1.FalconH1Mixer",
        falcon_mamba="modeling_falcon_mamba.FalconMambaMixer", jamba="modeling_jamba.JambaMambaMixer",
        granitemoehybrid="modeling_granitemoehybrid.GraniteMoeHybridMambaLayer",
        mamba="modeling_mamba.MambaMixer", mamba2="modeling_mamba2.Mamba2Mixer",
        nemotron_h="modeling_nemotron_h.NemotronHMamba2Mixer",
        zamba="modeling_zamba.ZambaMambaMixer", zamba2="modeling_zamba2.Zamba2MambaMixer",
    ),
    *_because(
        "some layers are short convolutions behind gates, which megatron-core has no module for", SSM,
        lfm2="modeling_lfm2.Lfm2ShortConv", lfm2_moe="modeling_lfm2_moe.Lfm2MoeShortConv",
        lfm3="modeling_lfm3.Lfm3ShortConv",
    ),
    *_because(
        "layers are recurrences that megatron-core has no module for", SSM,
        recurrent_gemma="modeling_recurrent_gemma.RecurrentGemmaRglru", rwkv="modeling_rwkv.RwkvSelfAttention",
    ),
    *_because(
        "linear attention decays by channel (Kimi delta attention); in megatron-core it decays by head", DELTA,
        bailing_hybrid="modeling_bailing_hybrid.BailingHybridDeltaAttention",
        kimi_linear="modeling_kimi_linear.KimiLinearDeltaAttention",
    ),
    *_because(
        "the delta rule has weights up to 2 (linear_allow_neg_eigval); those of megatron-core are at most 1",
        DELTA,
        olmo_hybrid="modeling_olmo_hybrid.OlmoHybridGatedDeltaNet",
    ),
    *_because(
        "linear attention is lightning attention, for which megatron-core has no module; residuals are scaled, and "
        "added after the norms",
        SSM, LAYER,
        minimax="modeling_minimax.MiniMaxLightningAttention",
    ),
    *_because(
        "layers mix several residual streams (hyper-connections); megatron-core's layer has one", LAYER,
        deepseek_v4="modeling_deepseek_v4.DeepseekV4HyperConnection", hy_v4="modeling_hy_v4.HYV4HyperConnection",
    ),
    *_because(
        "layers predict several residual streams from each other (AltUp); megatron-core's layer has one", LAYER,
        gemma3n_text="modeling_gemma3n.Gemma3nTextAltUp",
    ),
    *_because(
        "heads are larger in layers without a window (global_head_dim); megatron-core has one kv_channels", CONFIG,
        gemma4_text="configuration_gemma4.Gemma4TextConfig",
    ),
    *_because(
        "values are smaller than keys (v_head_dim) without latent attention; in megatron-core they have the same size",
        ATTENTION,
        mimo_v2_flash="modeling_mimo_v2_flash.MiMoV2FlashAttention",
    ),
    *_because(
        "some layers attend within chunks (attention_chunk_size); megatron-core's attend to everything or a window",
        CONFIG,
        llama4_text="modeling_llama4.create_chunked_causal_mask",
    ),
    *_because(
        "a layer has two attentions, two MLPs, and experts whose sum is added at its end; megatron-core's has one each",
        LAYER,
        longcat_flash="modeling_longcat_flash.LongcatFlashDecoderLayer",
    ),
    *_because(
        "the router samples experts, with a special gradient (SparseMixer); megatron-core's takes the best", ROUTER,
        phimoe="modeling_phimoe.sparsemixer",
    ),
    *_because(
        "queries and attention outputs are projected by routed experts; megatron-core routes MLPs only", ATTENTION,
        jetmoe="modeling_jetmoe.JetMoeMoA",
    ),
    *_because(
        "attention is the difference of two softmaxes, between heads of different halves; megatron-core's has one "
        "softmax per head",
        SCORES,
        diffllama="modeling_diffllama.DiffLlamaAttention",
    ),
    *_because(
        "residuals have a multiplier, which would have to be folded into weights: megatron-core's layer just adds",
        LAYER,
        granite="modeling_granite.GraniteDecoderLayer", granitemoe="modeling_granitemoe.GraniteMoeDecoderLayer",
        granitemoeshared="modeling_granitemoeshared.GraniteMoeSharedDecoderLayer",
    ),
    *_because(
        "the activation has two learned numbers in each layer (xIELU); that of megatron-core's MLP has none",
        MLP,
        apertus="modeling_apertus.ApertusMLP",
    ),
    *_because(
        "values decide the attention mask, and residuals have learned weights; megatron-core's layer just adds", LAYER,
        doge="modeling_doge.DogeDecoderLayer",
    ),
    Refusal(
        (
            *("bart", "longt5", "m2m_100", "marian", "mbart", "mt5", "pegasus", "switch_transformers"),
            *("t5", "t5gemma", "t5gemma2", "umt5"),
        ),
        "its decoder attends to an encoder, and GPTModel has no encoder",
        ("transformers.PretrainedConfig.is_encoder_decoder", GPT),
    ),
    Refusal(
        (
            *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "emu3", "ernie4_5_vl_moe"),
            *("gemma3n", "gemma4", "glm_ocr", "granite_speech", "idefics2", "idefics3", "internvl_chat"),
            *("janus", "kimi_vl", "lfm2_vl", "llama4", "mllama", "molmo2", "ovis2", "paligemma", "smolvlm"),
        ),
        "it joins models of images or sound to a text model that is none of our architectures, or is not causal",
        ("transformers.PretrainedConfig.sub_configs", GPT),
    ),
)
# fmt: on

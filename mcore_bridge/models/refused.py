"""Families that are not implemented, each with the reason and the code that shows the reason.

megatron-core's ``GPTModel`` cannot express some of them. Other families only need a submodule of megatron-core's layers
that nobody has written yet.
"""

from mcore_bridge.architecture import Refusal

GPT = "megatron.core.models.gpt.GPTModel"
LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
PARTS = "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules"
CONFIG = "megatron.core.transformer.TransformerConfig"
ATTENTION = "megatron.core.transformer.attention.SelfAttention"
LATENT = "megatron.core.transformer.multi_latent_attention.MLASelfAttention"
SCORES = "megatron.core.transformer.dot_product_attention.DotProductAttention"
ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
MLP = "megatron.core.transformer.mlp.MLPSubmodules"
DELTA = "megatron.core.ssm.gated_delta_net.GatedDeltaNet"
SSM = "megatron.core.ssm"
NO_CLASS = "transformers.CONFIG_MAPPING"


def _because(reason: str, *where: str, **classes: str) -> tuple[Refusal, ...]:
    """Yield a refusal for each family, with the part of its code in transformers that shows the reason.

    ``classes`` has the path of this part for each ``model_type``. The path begins in the folder of this name, without
    ``_text``. A path with two dots contains its folder.
    """
    return tuple(Refusal((name,), reason, (_path(name, seen), *where)) for name, seen in classes.items())


def _path(name: str, seen: str) -> str:
    folder = "" if seen.count(".") > 1 else f"{name.removesuffix('_text')}."
    return f"transformers.models.{folder}{seen}"


# fmt: off
REFUSALS = (
    *_because(
        "attention and MLP read the same input, as in phi; nobody has written rules for one tensor of q, k and v",
        PARTS,
        codegen="modeling_codegen.CodeGenAttention", falcon="modeling_falcon.FalconAttention",
    ),
    *_because(
        "attention and MLP read the same input, as in phi; nobody has written a table for its field names",
        PARTS,
        gptj="modeling_gptj.GPTJBlock",
    ),
    *_because(
        "positions are a bias of the scores (ALiBi); megatron-core has no such position embedding",
        GPT, SCORES,
        bloom="modeling_bloom.build_alibi_tensor", mpt="modeling_mpt.build_mpt_alibi_tensor",
    ),
    *_because(
        "each position has a learned vector, which GPTModel supports (learned_absolute); nobody has written rules "
        "for these vectors",
        GPT,
        gpt2="modeling_gpt2.GPT2Model", gpt_bigcode="modeling_gpt_bigcode.GPTBigCodeModel",
        opt="modeling_opt.OPTLearnedPositionalEmbedding",
    ),
    *_because(
        "some or all layers are Mamba-2 mixers, as in nemotron_h; nobody has written rules and a table for this family",
        SSM, PARTS,
        bamba="modeling_bamba.BambaMixer", mamba2="modeling_mamba2.Mamba2Mixer",
    ),
    *_because(
        "some layers share one attention, which reads the embeddings as well; each layer of megatron-core has its own",
        SSM, PARTS,
        zamba="modeling_zamba.ZambaMambaMixer", zamba2="modeling_zamba2.Zamba2MambaMixer",
    ),
    *_because(
        "all or some layers are Mamba-1 mixers; the mixers of megatron-core and of nemotron_h are Mamba-2, and "
        "nobody has written Mamba-1",
        SSM, PARTS,
        falcon_mamba="modeling_falcon_mamba.FalconMambaMixer", jamba="modeling_jamba.JambaMambaMixer",
        mamba="modeling_mamba.MambaMixer",
    ),
    *_because(
        "its text is an lfm2, which is supported; nobody has written how its model of images joins it", GPT,
        lfm2_vl="modeling_lfm2_vl.Lfm2VlModel",
    ),
    *_because(
        "layers are recurrences that megatron-core has no module for", SSM,
        recurrent_gemma="modeling_recurrent_gemma.RecurrentGemmaRglru", rwkv="modeling_rwkv.RwkvSelfAttention",
    ),
    *_because(
        "linear attention is lightning attention, for which megatron-core has no module; residuals are scaled, and "
        "added after the norms",
        SSM, LAYER,
        minimax="modeling_minimax.MiniMaxLightningAttention",
    ),
    *_because(
        "layers predict several residual streams from each other (AltUp); megatron-core's layer has one", LAYER,
        gemma3n_text="modeling_gemma3n.Gemma3nTextAltUp",
    ),
    *_because(
        "residuals have learned weights, or a factor that depends on the layer; nobody has written these submodules",
        PARTS,
        beam="modeling_beam.BeamDecoderLayer", muse_spark="modeling_muse_spark.MuseSparkResidualGate",
        muse_spark_text="modeling_muse_spark.MuseSparkResidualGate", zaya="modeling_zaya.ZayaResidualScaling",
    ),
    *_because(
        "layers have latent attention of different sizes, and a gate for each head; megatron-core has one size for all",
        LATENT,
        dots3_note="modeling_dots3_note.Dots3NoteTextAttention",
        dots3_note_text="modeling_dots3_note.Dots3NoteTextAttention",
    ),
    *_because(
        "some layers read the keys and values of another layer; each layer of megatron-core computes its own", LATENT,
        mistral_large4="modeling_mistral_large4.MistralLarge4TextAttention",
        mistral_large4_text="modeling_mistral_large4.MistralLarge4TextAttention",
    ),
    *_because(
        "norms have gates, and an indexer selects the keys of latent attention; nobody has written gated norms", LAYER,
        axk2="modeling_axk2.AXK2GatedRMSNorm",
    ),
    *_because(
        "attention has sinks and norms of queries and keys; nobody has written a table for both at once", SCORES,
        flint="modeling_flint.FlintAttention",
    ),
    *_because(
        "residuals have multipliers, and attention has sinks and a rope base for each layer; nobody has written "
        "such attention",
        SCORES,
        granite_swa="modeling_granite_swa.GraniteSWAAttention",
        granitemoe_swa="modeling_granitemoe_swa.GraniteMoeSWAAttention",
    ),
    *_because(
        "a config may have norms after attention and MLP together with multipliers of residuals; nobody has written "
        "both at once",
        PARTS,
        hyperclovax="modeling_hyperclovax.HyperCLOVAXDecoderLayer",
    ),
    *_because(
        "tokens compute the weights of its convolutions, and layers attend to sums of earlier blocks of layers; "
        "megatron-core has neither",
        ATTENTION, GPT,
        inkling2="modeling_inkling2.Inkling2DynamicShortConvolution",
        inkling2_text="modeling_inkling2.Inkling2DynamicShortConvolution",
        inkling2_loop_text="modeling_inkling2_loop.Inkling2LoopDynamicShortConvolution",
    ),
    *_because(
        "a layer has two attentions, two MLPs, and experts whose sum is added at its end; megatron-core's has one of "
        "each",
        LAYER,
        longcat_flash="modeling_longcat_flash.LongcatFlashDecoderLayer",
    ),
    *_because(
        "the router samples experts, with a special gradient (SparseMixer); megatron-core's takes the highest scores",
        ROUTER,
        phimoe="modeling_phimoe.sparsemixer",
    ),
    *_because(
        "queries and attention outputs are projected by routed experts; megatron-core routes MLPs only", ATTENTION,
        jetmoe="modeling_jetmoe.JetMoeMoA",
    ),
    *_because(
        "attention is the difference of two softmaxes over heads in the two halves; megatron-core has one softmax "
        "per head",
        SCORES,
        diffllama="modeling_diffllama.DiffLlamaAttention",
    ),
    *_because(
        "its output layer has fewer rows than its embedding (output_vocab_size); GPTModel has one vocabulary for both",
        GPT,
        apertus1p5_text="modeling_apertus1p5.Apertus1p5TextForCausalLM",
    ),
    *_because(
        "values decide the mask of attention, and residuals have learned weights; nobody has written such submodules",
        PARTS,
        doge="modeling_doge.DogeDecoderLayer",
    ),
    *_because(
        "published files have the router biases of text and of images in one tensor; nobody has written rules for a "
        "part of a tensor",
        ROUTER,
        ernie4_5_moe_vl="ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeMoeBlock",
        ernie4_5_vl_moe="modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeMoeBlock",
        ernie4_5_vl_moe_text="modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeMoeBlock",
    ),
    *_because(
        "residuals are scaled by a root of the number of layers beside latent attention; nobody has written both at "
        "once",
        LATENT, PARTS,
        minicpm3="modeling_minicpm3.MiniCPM3DecoderLayer",
    ),
    *_because(
        "norms stand before the output projections of attention and MLP, and weights have three values; nobody has "
        "written such norms",
        MLP, ATTENTION,
        bitnet="modeling_bitnet.BitNetMLP",
    ),
    *_because(
        "queries, keys and values are clipped (clip_qkv), and sizes are in parts of the config; nobody has written a "
        "table and rules for this family",
        ATTENTION,
        dbrx="modeling_dbrx.DbrxAttention",
    ),
    *_because(
        "some or all layers are applied several times; megatron-core applies each layer once", GPT,
        dory="modeling_dory.DoryModel", hrm_text="modeling_hrm_text.HrmTextStack",
    ),
    *_because(
        "experts are chosen by logits with a bias, between norms before and after them; nobody has written such a "
        "router",
        ROUTER,
        kolibri1="modeling_kolibri1.Kolibri1TopKRouter",
    ),
    *_because(
        "linear attention, windows and layers without a rope are in one model; nobody has written a table for all "
        "three",
        DELTA, ATTENTION,
        lara_mini="modeling_lara_mini.LaraMiniAttention",
    ),
    *_because(
        "one class has the text model and the models of images and sound, without a text_config; nobody has written "
        "rules for it",
        GPT,
        phi4_multimodal="modeling_phi4_multimodal.Phi4MultimodalFeatureEmbedding",
    ),
    *_because(
        "the text is a cohere2 with positions of images and features behind its first layers; nobody has written its "
        "table",
        PARTS,
        cohere_compass_text="modeling_cohere_compass.CohereCompassTextModel",
    ),
    *_because(
        "some layers attend to images (cross attention); GPTModel has no such layers", GPT,
        mllama_text_model="mllama.modeling_mllama.MllamaTextCrossAttention",
    ),
    *_because(
        "it is a draft head for speculative decoding, which reads hidden states of its target model", GPT,
        gemma4_assistant="modeling_gemma4_assistant.Gemma4AssistantForCausalLM",
        gemma4_unified_assistant="modeling_gemma4_unified_assistant.Gemma4UnifiedAssistantForCausalLM",
    ),
    *_because(
        "it denoises blocks of tokens, and attention within a block is bidirectional; GPTModel is causal", GPT,
        diffusion_gemma="modeling_diffusion_gemma.DiffusionGemmaDecoderTextAttention",
    ),
    Refusal(
        (
            *("baichuan", "chatglm", "deepseek", "deepseek_v41", "deepseek_vl_v2", "internlm", "internlm2"),
            *("joyai_llm_flash", "kimi_k3", "minicpm", "nemotron-nas", "orion", "phi3_v", "phi3small"),
            *("qwen", "xverse"),
        ),
        "transformers has no code for it, so there is no reference to compare logits with",
        (NO_CLASS,),
    ),
    Refusal(
        ("mimo_v2",),
        "one tensor of published files has q, k and v by the ranks that wrote it; no config says how many they were",
        (NO_CLASS,),
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
            *("apertus1p5", "aria", "cohere_compass", "Emu3", "emu3", "gemma3n", "glm_ocr", "hy_v4_vl"),
            *("inkling2_loop", "lfm3_vl", "mllama", "molmo2", "paddleocr_vl", "paligemma"),
        ),
        "it joins models of images or sound to a text model that is not supported, or is not causal",
        ("transformers.PretrainedConfig.sub_configs", GPT),
    ),
)
# fmt: on

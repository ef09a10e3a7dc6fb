"""Composites whose text model is one of our architectures: prefixes in published files, and tables of their fields.

The prefixes come from transformers' ``conversion_mapping`` and from checkpoint indexes.
"""

from typing import Any

from mcore_bridge.composite import BESIDE, IN_MODEL, IN_TEXT, IN_THINKER, INSIDE, THINKER, Composite
from mcore_bridge.config.fields import Ignore, Require
from mcore_bridge.config.tables import BASE, unread
from mcore_bridge.models.qwen2_5_vl_text import INITIAL


def parts(*names: str) -> Ignore:
    """Fields of the other parts of a composite."""
    return Ignore(
        "they describe the models of images, video and sound, and their connection to the text model, which are "
        "not built",
        names,
    )


OTHER_PARTS = parts(
    *("vision_config", "audio_config", "high_res_vision_config", "encoder_config", "projector_config"),
    *("perceiver_config", "vq_config", "vision_feature_layer", "vision_feature_layers", "vision_aspect_ratio"),
    *("vision_feature_select_strategy", "vision_use_cls_token", "image_grid_pinpoints", "image_seq_length"),
    *("projector_hidden_act", "projector_bias", "projector_layernorm_eps", "projector_pooling_ratio"),
    *("multimodal_projector_bias", "projection_hidden_size", "projection_layer_norm_eps", "projection_dim"),
    *("spatial_merge_size", "spatial_pool_mode", "spatial_pool_stride", "spatial_pool_out_channels"),
    *("downsample_ratio", "downsample_factor", "vision_soft_tokens_per_image"),
    *("mm_tokens_per_image", "alignment_intermediate_size", "adapter_layer_norm_eps", "token_classification_bias"),
)
LABELS = Ignore("it marks labels that a loss of transformers leaves out", ("ignore_index",))
TEXT = Ignore(
    "the text config has its own table", ("text_config", "tie_word_embeddings", "initializer_range", "sliding_window")
)
FIELDS = (*BASE, OTHER_PARTS, TEXT)
LIGHTON = ("LightOnOCRForConditionalGeneration",)
"""The class of published files that have the ``model_type`` of Mistral 3, from before transformers had LightOnOCR."""
STEP = ("Step3p7FlashForCausalLM",)
IDEFICS: dict[str, Any] = {"in_memory": IN_TEXT, "fields": (*FIELDS, parts("scale_factor", "_pad_token_id"))}
OVIS = (*FIELDS, parts("visual_indicator_token_ids", "hidden_size", "vocab_size"))
ASR = (*FIELDS, parts("audio_chunk_size", "audio_merge_size", "timestamp_token_id"))
MUSIC = (
    *FIELDS,
    parts(
        *("audio_frame_step", "audio_bos_token_id", "audio_eos_token_id"),
        *("head_dim", "max_position_embeddings", "rope_parameters"),  # of positions in time
    ),
)
CHARTS = (
    *FIELDS,
    parts("freeze_vision_tower", "use_im_start_end", "im_start_token", "im_end_token"),
    unread("max_window_layers"),  # text_config has no such field, and no window
)
GLIMMER = (*FIELDS, parts("out_hidden_size", "projector_hidden_size"))
GRANITE = (*FIELDS, parts("downsample_rate", "has_lora_adapter", "window_size"))
MINICPM = (
    *FIELDS,
    parts(
        *("downsample_mode", "drop_vision_last_layer", "insert_layer_id", "merge_kernel_size", "merger_times"),
        *("image_size", "patch_size", "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"),
    ),
)
UNTRIED = "nobody has tried to train its models of images"
HEARS: dict[str, Any] = {"without_tower": "models of sound are not built", "in_memory": None}
UNSCALED = (
    "transformers' class of this composite leaves out the scale of the logits, which its text model and engines apply"
)
SPEECH = Ignore(
    "they describe models of speech and sound, which are not built, and their tokens and times",
    (
        *("thinker_config", "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output"),
        *("position_id_per_seconds", "seconds_per_chunk", "im_start_token_id", "im_end_token_id"),
        *("audio_start_token_id", "audio_end_token_id", "user_token_id", "system_token_id", "assistant_token_id"),
        *("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"),
    ),
)
OMNI: dict[str, Any] = {
    "spelling": THINKER,
    "in_memory": IN_THINKER,
    "fields": (*FIELDS, SPEECH, LABELS, INITIAL),
    "inside": "thinker_config",
    "not_built": ("talker.", "token2wav.", "code2wav."),
    "tower": (("visual.", "thinker.visual."), ("audio_tower.", "thinker.audio_tower.")),
}
TILES = Ignore(
    "they describe how a processor or a model of images, which is not built, cuts images into tiles and joins patches",
    (
        *("force_image_size", "dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch"),
        *("pad2square", "image_fold", "patch_size", "norm_mean", "norm_std", "ps_version", "select_layer"),
        *("projector_hidden_size", "vision_hidden_size", "vit_hidden_size", "video_pruning_rate"),
        *("video_temporal_patch_size", "video_target_num_patches", "video_maintain_aspect_ratio"),
        *("template", "system_message", "img_start_token", "img_end_token", "img_context_token", "max_sequence_length"),
        *("video_context_token", "sound_context_token", "media_placeholder_token_id"),
    ),
)
TILED = (
    *(*FIELDS, LABELS, TILES),
    Require("use_llm_lora", (0, None), "its files would have adapters beside the weights"),
    Require("use_backbone_lora", (0, None), "its files would have adapters beside the weights"),
    Ignore("the text config has its own", ("hidden_size", "vocab_size", "max_position_embeddings")),
)
IN_LLM = (("text_config", "llm_config"),)
NEMOTRON: dict[str, Any] = {
    "spelling": INSIDE,
    "in_memory": None,
    "fields": TILED,
    "published_fields": (
        *(*IN_LLM, ("audio_config", "sound_config"), ("vision_hidden_size", "vit_hidden_size")),
        *(("image_token_id", "img_context_token_id"), ("video_token_id", "video_context_token_id")),
        ("audio_token_id", "sound_context_token_id"),
    ),
}
BY_TILES = "nobody has written how its model of images, which cuts images into tiles, joins a text"
REMOTE: dict[str, Any] = {
    "is_remote": True,
    "in_memory": None,
    "without_tower": "transformers has no code for its models of images",
}
KIMI = (
    ("vision_tower.layers.*.norm1.", "vision_tower.encoder.blocks.*.norm0."),
    ("vision_tower.layers.*.norm2.", "vision_tower.encoder.blocks.*.norm1."),
    ("vision_tower.layers.*.mlp.fc1.", "vision_tower.encoder.blocks.*.mlp.fc0."),
    ("vision_tower.layers.*.mlp.fc2.", "vision_tower.encoder.blocks.*.mlp.fc1."),
    ("vision_tower.layers.*.attn.proj.", "vision_tower.encoder.blocks.*.wo."),
    ("vision_tower.layers.*.attn.wqkv.", "vision_tower.encoder.blocks.*.wqkv."),
    ("vision_tower.final_layernorm.", "vision_tower.encoder.final_layernorm."),
    ("vision_tower.patch_embed.pos_emb.position_embeddings", "vision_tower.patch_embed.pos_emb.weight"),
    ("mm_projector.in_proj.", "mm_projector.proj.0."),
    ("mm_projector.out_proj.", "mm_projector.proj.2."),
)
MINIMAX = (
    ("vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
    ("vision_tower.layers.", "vision_tower.vision_model.encoder.layers."),
    ("vision_tower.pre_layrnorm.", "vision_tower.vision_model.pre_layrnorm."),
    ("multi_modal_projector.merge_linear_1.", "patch_merge_mlp.linear_1."),
    ("multi_modal_projector.merge_linear_2.", "patch_merge_mlp.linear_2."),
)
M3: dict[str, Any] = {
    "fields": (*FIELDS, parts("projector_hidden_size", "merged_hidden_size")),
    "text": "minimax_m3_vl_text",
    "tower": MINIMAX,
}
UNIFIED = (
    ("embed_vision.multimodal_embedder.", "model.embed_vision."),
    ("embed_vision.", "model.vision_embedder."),
    ("", "model."),
)
HUNYUAN = (
    ("vision_tower.layers.*.layer_norm1.", "vit.layers.*.input_layernorm."),
    ("vision_tower.layers.*.layer_norm2.", "vit.layers.*.post_attention_layernorm."),
    ("vision_tower.layers.*.mlp.fc1.", "vit.layers.*.mlp.dense_h_to_4h."),
    ("vision_tower.layers.*.mlp.fc2.", "vit.layers.*.mlp.dense_4h_to_h."),
    ("vision_tower.patch_merger.proj_conv.", "vit.perceive.proj.0."),
    ("vision_tower.patch_merger.proj_out.", "vit.perceive.proj.2."),
    ("vision_tower.patch_merger.", "vit.perceive."),
    ("vision_tower.", "vit."),
)

# fmt: off
COMPOSITES = (
    Composite(model_type="qwen3_5",          spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="qwen3_5_moe",      spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="qwen3_vl",         spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="qwen3_vl_moe",     spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="qwen2_vl",         spelling=BESIDE,   fields=FIELDS, text="qwen2_vl_text"),
    Composite(model_type="qwen2_5_vl",       spelling=BESIDE,   fields=FIELDS, text="qwen2_5_vl_text"),
    Composite(model_type="glm4v",            spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="glm46v",           spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="glm4v_moe",        spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="hunyuan_vl",       spelling=BESIDE,   fields=FIELDS, text="hunyuan_vl_text", tower=HUNYUAN),
    Composite(model_type="internvl",         spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="mistral3",         spelling=INSIDE,   fields=FIELDS, classes=LIGHTON),
    Composite(model_type="gemma3",           spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="gemma4",           spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="gemma4_unified",   spelling=IN_MODEL, fields=FIELDS, tower=UNIFIED),
    Composite(model_type="llama4",           spelling=INSIDE,   fields=FIELDS, in_memory=None, broken_in=("5.24.0",)),
    Composite(model_type="kimi_k25",         spelling=INSIDE,   fields=FIELDS, tower=KIMI, joined_qkv="wqkv"),
    Composite(model_type="minimax_m3_vl",    spelling=INSIDE,   **M3),
    Composite(model_type="exaone4_5",        spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="llava",            spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="llava_next",       spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="llava_next_video", spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="llava_onevision",  spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="vipllava",         spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="video_llava",      spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="got_ocr2",         spelling=INSIDE,   fields=FIELDS),
    Composite(model_type="lighton_ocr",      spelling=IN_MODEL, fields=FIELDS),
    Composite(model_type="qwen2_audio",      spelling=INSIDE,   fields=(*FIELDS, LABELS), **HEARS),
    Composite(model_type="voxtral",          spelling=INSIDE,   fields=FIELDS, **HEARS),
    Composite(model_type="qwen2_5_omni",     **OMNI),
    Composite(model_type="qwen3_omni_moe",   **OMNI),
    Composite(model_type="qwen2_5_omni_thinker",   spelling=BESIDE, fields=OMNI["fields"]),
    Composite(model_type="qwen3_omni_moe_thinker", spelling=BESIDE, fields=OMNI["fields"]),
    Composite(model_type="nemotron_h_omni",      **NEMOTRON, without_tower=BY_TILES),
    Composite(model_type="NemotronH_Nano_VL_V2", **NEMOTRON | REMOTE),
    Composite(model_type="internvl_chat",    spelling=INSIDE,   fields=TILED, published_fields=IN_LLM, **REMOTE),
    Composite(model_type="kimi_vl",          spelling=INSIDE,   fields=TILED, **REMOTE),
    Composite(model_type="glmasr",           spelling=INSIDE,   fields=FIELDS, **HEARS),
    Composite(model_type="aya_vision",          spelling=INSIDE,   fields=FIELDS,  without_tower=UNTRIED,
              without_reference=UNSCALED),
    Composite(model_type="cohere2_vision",      spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED,
              without_reference=UNSCALED),
    Composite(model_type="deepseek_vl",         spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="deepseek_vl_hybrid",  spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="fast_vlm",            spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="idefics2",            spelling=IN_TEXT,  **IDEFICS, without_tower=UNTRIED),
    Composite(model_type="idefics3",            spelling=IN_TEXT,  **IDEFICS, without_tower=UNTRIED),
    Composite(model_type="janus",               spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="minicpm_ocr",         spelling=IN_MODEL, fields=MINICPM, without_tower=UNTRIED),
    Composite(model_type="minicpmv4_6",         spelling=IN_MODEL, fields=MINICPM, without_tower=UNTRIED),
    Composite(model_type="minicpmv4_7",         spelling=IN_MODEL, fields=MINICPM, without_tower=UNTRIED),
    Composite(model_type="ovis2",               spelling=IN_MODEL, fields=OVIS,    without_tower=UNTRIED),
    Composite(model_type="perception_lm",       spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="qianfan_ocr",         spelling=INSIDE,   fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="smolvlm",             spelling=IN_TEXT,  **IDEFICS, without_tower=UNTRIED),
    Composite(model_type="video_llama_3",       spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="glmga",               spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="glm5_next",           spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="qwen4_exp",           spelling=IN_MODEL, fields=FIELDS,  without_tower=UNTRIED),
    Composite(model_type="muse_glimmer",        spelling=IN_MODEL, fields=GLIMMER, without_tower=UNTRIED),
    Composite(model_type="pp_chart2table",      spelling=INSIDE,   fields=CHARTS,  without_tower=UNTRIED),
    Composite(model_type="moss_transcribe_diarize", spelling=IN_MODEL, fields=ASR, **HEARS),
    Composite(model_type="step3p7",             spelling=BESIDE,   fields=FIELDS,  without_tower=UNTRIED, classes=STEP),
    Composite(model_type="musicflamingo",       spelling=INSIDE,   fields=MUSIC,   **HEARS),
    Composite(model_type="qwen3_asr",           spelling=IN_MODEL, fields=ASR,     **HEARS),
    Composite(model_type="audioflamingo3",      spelling=INSIDE,   fields=FIELDS,  **HEARS),
    Composite(model_type="granite_speech",      spelling=INSIDE,   fields=GRANITE, **HEARS,
              without_reference=UNSCALED),
    Composite(model_type="granite_speech_plus", spelling=INSIDE,   fields=GRANITE, **HEARS,
              without_reference=UNSCALED),
)
# fmt: on

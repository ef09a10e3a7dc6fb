"""Small composites of transformers: a text of the zoo, and other parts as small as their configs allow."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto import modeling_auto

import mcore_bridge as mb
from mcore_bridge.architecture import composites
from mcore_bridge.commands.verify.logits import forward
from mcore_bridge.composite import core_of
from mcore_bridge.rules.mapping import respelled_name
from tests import zoo
from tests.support.stepping import meet
from tests.support.written_weights import read
from tests.zoo import NEWEST

TEXTS = {case.model_type: case.hf for case in zoo.cases().values()}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "depth": 1,
    "num_heads": 2,
    "embed_dim": 32,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "pooling_kernel_size": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 32,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "audio_embed_dim": 24,
    "mlp_dim": 48,
    "output_channels": 32,
    "window_size": 2,
    "projection_dim": 32,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 48,
    "vt_num_hidden_layers": 1,
    "vt_num_attention_heads": 2,
    "mlp_ratio": 2,
    "image_size": 28,
    "patch_size": 14,
    "global_attn_indexes": [0],
    "fullatt_block_indexes": [0],
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "deepstack_visual_indexes": [0],
    "num_layers": 1,
    "hidden_dim": 32,
    "dim_head": 16,
    "context_size": 8,
    "max_pos_emb": 8,
    "encoder_hidden_size": 32,
    "base_channels": 32,
    "latent_channels": 32,
    "channel_multiplier": [1, 1],
    "num_embeddings": 16,
    "num_res_blocks": 1,
    "resampler_depth": 1,
    "resampler_n_latents": 4,
    "vocab_size": 24,
}
_OPTIONAL: dict[str, Any] = {
    "gemma4": {"vision_config": {"standardize": True}, "audio_config": {"use_clipped_linears": False}},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
}
"""Parts that a config does not have by default."""
if transformers.__version__ == "5.24.0":
    MoeCausalLMOutputWithPast.image_outputs = None  # Llama 4's composite reads it there, and raises without it
_WITH_INNER = re.compile("gemma3|llava")
_AUTO = ("MULTIMODAL_LM", "TEXT_TO_WAVEFORM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM")


def config(model_type: str, /, **text: Any) -> Any:
    """A small config of a composite. ``model_type`` among ``text`` chooses the kind of its text."""
    whole = CONFIG_MAPPING[model_type](**_OPTIONAL.get(model_type, {}))
    default = core_of(whole, composites()[model_type])
    inner = {**TEXTS[text.get("model_type", default.text_config.model_type)].to_dict(), **text}
    if model_type == "inkling_mm_model":
        inner["mlp_layer_types"] = ["dense", "sparse", "sparse", "dense"]
    if "num_nextn_predict_layers" in inner:
        inner["num_nextn_predict_layers"] = 0  # the default of 5.17 is 1, and the text here has no MTP layers
    parts = {
        name: _small(getattr(default, name), inner["hidden_size"])
        for name in sorted(type(default).sub_configs)
        if name != "text_config" and getattr(default, name, None) is not None
    }
    sizes = {name: inner[name] for name in ("hidden_size", "vocab_size") if name in default.to_dict()}
    hf = type(default)(text_config=inner, tie_word_embeddings=inner["tie_word_embeddings"], **parts, **sizes)
    if model_type == "nemotron_h_omni":
        hf.vision_hidden_size, hf.projector_hidden_size = 32, 48
    if model_type == "inkling_mm_model":
        hf.vision_config.num_hidden_layers = 4  # fewer ones need scipy
    if model_type == "muse_glimmer":
        hf.out_hidden_size, hf.projector_hidden_size = 128, 48
    if model_type == "qwen3_5":
        hf.text_config.rope_parameters["partial_rotary_factor"] = 0.25  # 5.17 sets it at the top, too
    if inside := composites()[model_type].inside:
        return type(whole)(**{inside: hf.to_dict()}, enable_audio_output=False)
    return hf


def text_of(hf: Any) -> Any:
    """The text config within the config of a composite."""
    return core_of(hf, composites()[hf.model_type]).text_config


def _small(part: Any, text_size: int) -> dict[str, Any]:
    fields = part.to_dict()
    for name in _SIZES.keys() & fields.keys():
        size: Any = _SIZES[name]
        size = float(size) if isinstance(fields[name], float) else size
        fields[name] = [size, size] if isinstance(fields[name], list | tuple) and isinstance(size, int) else size
    return fields | {name: text_size for name in ("out_hidden_size", "text_hidden_size") if name in fields}


def model_class(model_type: str) -> Any:
    """The class of transformers that has the language model head of a composite."""
    tables = (getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in _AUTO)
    names = [table[model_type] for table in tables if model_type in table]
    return getattr(transformers, names[0]) if names else None


def thinker_of(model: Any) -> Any:
    """The part of transformers' model that has the text and its towers."""
    return getattr(model, "thinker", model)


def written(model_type: str, folder: Path, *, published: bool = True, **text: Any) -> Tensor:
    """Write a random composite as it is published, and return transformers' fp32 logits of ``tokens`` without images.

    With ``published=False`` the file is written by transformers.
    """
    hf = config(model_type, **text)
    torch.manual_seed(0)
    if lacks_tower(hf):
        return _text_written(hf, folder)
    model = model_class(model_type)(hf).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        model.save_pretrained(folder)
        seen = thinker_of(model)
        whole = _text_of(seen) if composites()[model_type].without_reference else seen
        logits: Tensor = whole(tokens()).logits
    file = folder / "model.safetensors"
    if model_type == "qwen2_5_omni":
        torch.save({}, folder / "spk_dict.pt")  # the voices, without which transformers does not load it
    if published:
        beside = {f"{prefix}model.norm.weight": torch.randn(6) for prefix in composites()[model_type].not_built}
        state = dict(as_published(model_type, load_file(file))) | beside
        save_file(state, file, metadata={"format": "pt"})
    return logits


def _text_of(model: Any) -> Any:
    """The text model of a composite, whose head scales logits, unlike the head of the composite."""
    text = AutoModelForCausalLM.from_config(model.config.text_config).eval()
    text.model, text.lm_head = base_of(model).language_model, model.get_output_embeddings()
    if not hasattr(text.model, "embed_tokens"):  # before release 5, a whole model is inside
        text.model = text.model.model
    return text


def base_of(model: Any) -> Any:
    """The composite in a model with a head. Llama 4 has only one class."""
    return getattr(model, "model", model)


def lacks_tower(hf: Any) -> bool:
    """Whether the tower is a model of timm, which is not installed."""
    return hf.vision_config.model_type == "timm_wrapper" if hasattr(hf, "vision_config") else False


def _text_written(hf: Any, folder: Path) -> Tensor:
    """Write the text model under the names of its composite, and a tensor in the place of the tower."""
    text = AutoModelForCausalLM.from_config(hf.text_config).eval()
    with torch.no_grad():
        for parameter in text.parameters():
            parameter.normal_(std=0.2)
        logits: Tensor = text(tokens()).logits
    spelling = composites()[hf.model_type].spelling
    state = {respelled_name(name, spelling): tensor for name, tensor in text.state_dict().items()}
    hf.dtype = "float32"
    hf.save_pretrained(folder)
    state["model.vision_tower.a_tensor"] = torch.randn(3, 5)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return logits


def as_published(model_type: str, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as published files have them. transformers 5 changes names of Kimi and Qianfan, of experts, and of a CLIP
    or SigLIP.
    """
    inner = "vision_model." if _WITH_INNER.search(model_type) and NEWEST else ""
    for name, tensor in state.items():
        if model_type == "qwen3_vl_moe" and tensor.dim() == 3 and "experts" in name:
            tensor = tensor.transpose(1, 2).contiguous() if NEWEST else tensor
        name = re.sub(r"^((vision|image|video)_tower\.)", rf"\1{inner}", name)
        name = re.sub(r"^model\.(?=mm_projector\.)|(?<=^vision_tower\.)encoder\.(?=patch_embed)", "", name)
        yield re.sub(r"(?<=^language_model\.model\.)(blocks|encoder\.layers)\.", "layers.", name), tensor


def parts_of(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the text in a folder, and the tensors that a save copies."""
    mapping, state = mb.mapping(folder), read(folder)
    copied = {name: tensor for name, tensor in state.items() if mapping.is_not_built(name)}
    return {name: tensor for name, tensor in state.items() if name not in copied}, copied


def tokens() -> Tensor:
    """Token ids, int64 [2, 16], without image tokens."""
    return torch.randint(40, 90, (2, 16), generator=torch.Generator().manual_seed(3))


def load_and_save(folder: Path, dims: mb.ParallelDims, saved: Path) -> Tensor | None:
    """Runs on each rank: load, save the whole folder again, and return the logits of the text on this mesh."""
    meet(dims)
    models = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
    logits = forward(models, dims, tokens())
    mb.save_hf_checkpoint(models, saved)
    return logits


def load_save_and_compare(folder: Path, dims: mb.ParallelDims, saved: Path, reference: Tensor) -> float | None:
    """As ``load_and_save``, but return the largest difference to the reference, relative to its spread."""
    logits = load_and_save(folder, dims, saved)
    return None if logits is None else float((logits - reference).abs().max() / reference.std())


def assert_same(one: Path, other: Path) -> mb.Manifest:
    """Assert that both folders have equal tensors, bit for bit."""
    first, second = (mb.Manifest.from_folder(folder, digests=True) for folder in (one, other))
    assert first.differences(second) == second.differences(first) == ()
    return first


def is_in_transformers(model_type: str) -> bool:
    """Whether the installed release has a composite, with a head, whose text is in the zoo."""
    if model_type not in CONFIG_MAPPING or model_class(model_type) is None:
        return False
    return text_of(CONFIG_MAPPING[model_type]()).model_type in TEXTS


NAMES = [name for name in composites() if is_in_transformers(name)]

"""MiniMax-M3 without images, under the name of its published text config, which transformers lacks."""

from dataclasses import replace

from mcore_bridge.models import minimax_m3_vl_text

ARCHITECTURE = replace(
    minimax_m3_vl_text.ARCHITECTURE,
    model_type="minimax_m3",
    classes=("MiniMaxM3ForCausalLM",),
    reads_as="minimax_m3_vl_text",
)

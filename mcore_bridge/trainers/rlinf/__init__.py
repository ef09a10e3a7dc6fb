"""The interface for RLinf, with RLinf's names. ``docs/trainers/rlinf.md`` shows where RLinf uses each name."""

from mcore_bridge.convert.rank_files.rank_folder import iter_mg_weights
from mcore_bridge.trainers.rlinf.actor import Actor, read_actor
from mcore_bridge.trainers.rlinf.convertor import convert_hf_to_mg, hf_to_middle_file, middle_file_to_mg
from mcore_bridge.trainers.rlinf.functions import ReshardFunctions
from mcore_bridge.trainers.rlinf.model_provider import model_provider
from mcore_bridge.trainers.rlinf.rules import ConvertorRule, convertor_rules
from mcore_bridge.trainers.rlinf.weight_reshard import MegatronCoreWeightReshard

__all__ = [
    "Actor",
    "ConvertorRule",
    "MegatronCoreWeightReshard",
    "ReshardFunctions",
    "convert_hf_to_mg",
    "convertor_rules",
    "hf_to_middle_file",
    "iter_mg_weights",
    "middle_file_to_mg",
    "model_provider",
    "read_actor",
]

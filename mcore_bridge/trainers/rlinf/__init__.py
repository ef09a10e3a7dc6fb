"""What RLinf drives, in its words. ``docs/rlinf.md`` says where each goes."""

from mcore_bridge.trainers.rlinf.actor import Actor, read_actor
from mcore_bridge.trainers.rlinf.functions import ReshardFunctions
from mcore_bridge.trainers.rlinf.provider import model_provider
from mcore_bridge.trainers.rlinf.reshard import MegatronCoreWeightReshard
from mcore_bridge.trainers.rlinf.rules import ConvertorRule, convertor_rules

__all__ = [
    "Actor",
    "ConvertorRule",
    "MegatronCoreWeightReshard",
    "ReshardFunctions",
    "convertor_rules",
    "model_provider",
    "read_actor",
]

"""What RLinf drives, in its words: its resharder, its functions and rules. ``docs/rlinf.md`` says where each goes."""

from mcore_bridge.trainers.rlinf.functions import ReshardFunctions
from mcore_bridge.trainers.rlinf.reshard import MegatronCoreWeightReshard
from mcore_bridge.trainers.rlinf.rules import ConvertorRule, convertor_rules

__all__ = ["ConvertorRule", "MegatronCoreWeightReshard", "ReshardFunctions", "convertor_rules"]

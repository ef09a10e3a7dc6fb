"""Importing this module makes miles use mcore_bridge in the place of Megatron-Bridge, in this process."""

from mcore_bridge.trainers.miles import AutoBridge
from mcore_bridge.trainers.module_patch import MEGATRON_BRIDGE, replace_modules

__all__ = ["AutoBridge"]

replace_modules(MEGATRON_BRIDGE | {"megatron.bridge": "mcore_bridge.trainers.in_miles"})

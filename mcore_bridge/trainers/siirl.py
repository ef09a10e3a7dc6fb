"""Importing this module makes siiRL's ``use_mbridge=True`` use mcore_bridge, in this process.

siiRL imports the module before it imports a bridge, if ``model.external_lib`` of its config names it.
"""

from mcore_bridge.trainers.module_patch import replace_modules

replace_modules({"siirl.models.mcore.mbridge": "mcore_bridge.trainers.mbridge"})

"""Import this to make siiRL's ``use_mbridge=True`` use mcore_bridge, in this process.

siiRL imports it if ``model.external_lib`` of its config names it, before it looks for a bridge.
"""

from mcore_bridge.trainers.module_patch import replace_modules

replace_modules({"siirl.models.mcore.mbridge": "mcore_bridge.trainers.mbridge"})

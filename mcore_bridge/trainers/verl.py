"""Importing this makes verl build, load, export and save with mcore_bridge, in this process and both of its flavours.

verl imports it itself, in every process and before it looks for a bridge, where the environment variable
``VERL_USE_EXTERNAL_MODULES`` names it. Whoever merely has both installed sees no change: there is no entry point, which
verl would load without being asked, and whose failure it would not show.
"""

from mcore_bridge.trainers.module_patch import replace_modules

replace_modules(
    {
        "verl.models.mcore.mbridge": "mcore_bridge.trainers.mbridge",
        "verl.models.mcore.bridge": "mcore_bridge.trainers.megatron_bridge",
        "megatron.bridge.training.utils.config_utils": "mcore_bridge.trainers.verl_config_utils",
        "verl.models.mcore.registry": "mcore_bridge.trainers.verl_registry",
        "verl.workers.config.megatron_peft": "mcore_bridge.trainers.verl_peft",
        "verl.utils.kernel.linear_cross_entropy": "mcore_bridge.trainers.verl_kernels",
    }
)

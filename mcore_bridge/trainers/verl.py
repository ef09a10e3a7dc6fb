"""Import this to make verl build, load, export and save with mcore_bridge in this process, with either of its bridges.

verl imports it in every process before it looks for a bridge, if the environment variable
``VERL_USE_EXTERNAL_MODULES`` names it. Installing both packages changes nothing. There is no entry point on purpose:
verl would load it unasked, and would not show its failure.
"""

from mcore_bridge.trainers.module_patch import replace_modules

replace_modules(
    {
        "verl.models.mcore.mbridge": "mcore_bridge.trainers.mbridge",
        "verl.models.mcore.bridge": "mcore_bridge.trainers.megatron_bridge",
        "megatron.bridge.training.utils.config_utils": "mcore_bridge.trainers.verl_config_utils",
        "megatron.bridge.peft.utils": "mcore_bridge.trainers.verl_peft_utils",
        "megatron.bridge.training.checkpointing": "mcore_bridge.trainers.verl_checkpointing",
        "verl.models.mcore.registry": "mcore_bridge.trainers.verl_registry",
        "verl.workers.config.megatron_peft": "mcore_bridge.trainers.verl_peft",
        "verl.utils.kernel.linear_cross_entropy": "mcore_bridge.trainers.verl_kernels",
    }
)

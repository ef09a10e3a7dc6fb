"""Ling 2.0 and Ring, as most of their files say: the name of Ling 1, whose router is another and which is refused."""

from dataclasses import replace

from mcore_bridge.models import bailing_moe_v2

ARCHITECTURE = replace(bailing_moe_v2.ARCHITECTURE, model_type="bailing_moe")

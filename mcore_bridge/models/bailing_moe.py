"""Ling 2.0 and Ring, by the name in most of their files. Ling 1 has this name too, but another router: refused."""

from dataclasses import replace

from mcore_bridge.models import bailing_moe_v2

ARCHITECTURE = replace(bailing_moe_v2.ARCHITECTURE, model_type="bailing_moe")

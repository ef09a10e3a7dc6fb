"""Weights that ``peft`` merges in fp64, to be rounded once."""

import peft
import torch

from tests.support import tiny
from tests.support.peft_models import ALPHA, RANK, named, of_peft


def merged(hf, targets, dtype, folder=None, *, factors=None, **options):
    """Factors in our names, the base, and the weights that ``peft`` merges in fp64, of a random model in ``dtype``.

    ``peft`` also saves the adapter to ``folder``. The dtype of the adapter is ``factors``, or the dtype of the base.
    """
    base = tiny.random_model(hf).to(dtype).state_dict()
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **of_peft(targets), **options)
    model = peft.get_peft_model(tiny.random_model(hf), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(factors or dtype if ".lora_" in name else dtype)
    factors = dict(named(model.state_dict(), hf, "fused"))
    if folder is not None:
        model.save_pretrained(folder)
    wide = model.double().merge_and_unload().state_dict()
    return factors, base, {name: _nearest(tensor, dtype) for name, tensor in wide.items()}


def _nearest(wide, dtype):
    """The nearest value in ``dtype``. It is computed here, because torch's cast to 16 bits rounds twice."""
    middle = wide.to(dtype)
    choices = [middle, *(middle.nextafter(torch.full_like(middle, side)) for side in (-torch.inf, torch.inf))]
    distance = torch.stack([(choice.double() - wide).abs() for choice in choices])
    return torch.stack(choices).gather(0, distance.argmin(0)[None])[0]

"""How far log-probs in half precision may be off: measured by what transformers' own are."""


def excess(errors, own, *, routed):
    """Errors relative to what is allowed where transformers' ``own`` are so; of all tokens ``[rows, seq]``."""
    if routed:
        most, allowed = (each[own != 0].abs().quantile(0.75) for each in (errors, own))
        return float(most / allowed) / 3
    return float((errors.norm(dim=1) / own.norm(dim=1)).max()) / 2

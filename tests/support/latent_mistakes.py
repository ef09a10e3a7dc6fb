"""Mistakes in latent attention."""

from mcore_bridge.factory.modules.torch_modules import Norm


def with_epsilon_of_mcore(self, config, hidden_size, eps=1e-5):
    Norm.__init__(self, config, hidden_size, eps)

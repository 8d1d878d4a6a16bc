"""Random numbers keyed by what they are for: what policies that draw draw by."""

from prunevit.kernels.draws import keyed_uniform

__all__ = ["keyed_uniform"]

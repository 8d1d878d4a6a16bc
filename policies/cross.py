"""Cross: one policy says which patches stay, another how many.

It shows what a score is worth apart from the count it was published with. The first lends its ranking
(`PruningPolicy.score`), the second the number of patch rows that it would leave in each image, fused and merged ones
included. Nothing is fused or merged.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from prunevit.checks import check_seed
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.settings import construct, settings_of
from prunevit.tokens import AttentionState, RaggedTokens


class Cross(PruningPolicy):
    """Keep as many patches as `count` would, the best by the score of `score`.

    It acts before its blocks if one of the two does, else after their attention.
    """

    def __init__(
        self,
        score: str | Mapping[str, Any] | PruningPolicy = "evit",
        count: str | Mapping[str, Any] | PruningPolicy = "ats",
        layers: Layers = (3, 6, 9),
        seed: int = 0,
    ) -> None:
        """Choose the two.

        Args:
            score: Policy that ranks patches: a name, a mapping of `name` and its settings, or a policy that acts at
                the same layers.
            count: Policy that says how many stay, likewise.
            layers: Blocks where it acts.
            seed: Of a policy that is given by name and draws.

        Raises:
            ValueError: If a name or a setting is not known, or `score` does not rank patches.
        """
        super().__init__(None, layers)
        check_seed("Cross", seed)
        self.which = _built("score", score, self._layers_given, seed)
        self.number = _built("count", count, self._layers_given, seed)
        if type(self.which).score is PruningPolicy.score:
            raise ValueError(
                f"Cross: score must be a policy that ranks patches, got {type(self.which).__name__}"
            )
        self.needs = self.which.needs | self.number.needs
        before = "before_block" in (self.which.site, self.number.site)
        self.site = "before_block" if before else "after_attention"

    def setup(self, info: ModelInfo) -> None:
        """Set the two up.

        Raises:
            ValueError: If one of them acts at other layers.
        """
        super().setup(info)
        for role, policy in (("score", self.which), ("count", self.number)):
            policy.setup(info)
            if policy.layers != self.layers:
                raise ValueError(f"Cross: {role} must act at layers {self.layers}, got {policy.layers}")

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """The score of the first."""
        return self.which.score(tokens, attention, layer)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the best by the first, as many as the second would.

        Raises:
            ValueError: If the second only masks rows, as learned policies do in training.
        """
        decision = self.number(tokens, attention, layer)
        if decision.soft is not None:
            raise ValueError("Cross: count must remove rows, got a soft mask; call eval() on the model")
        score = self.score(tokens, attention, layer)
        if decision.rows_per_image is not None:
            return top_k(tokens, score, count=decision.rows_per_image - tokens.num_prefix_tokens)
        return top_k(tokens, score, count=tokens.sum((decision.keep & tokens.is_patch).int()))

    def macs(self, counts: Tensor) -> Tensor:
        """Those of the two."""
        return self.which.macs(counts) + self.number.macs(counts)

    def extra_repr(self) -> str:
        """Name the layers; the two follow by themselves."""
        return f"layers={self._layers_given}"


def _built(
    role: str, policy: str | Mapping[str, Any] | PruningPolicy, layers: Layers, seed: int
) -> PruningPolicy:
    """The policy itself, or the one that a name and its settings stand for."""
    # The table of names holds this class too.
    from prunevit.policies import resolve

    if isinstance(policy, PruningPolicy):
        return policy
    settings = {"name": policy} if isinstance(policy, str) else policy
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise ValueError(f"Cross: {role} must have a name, got {settings}")
    settings = dict(settings)
    cls = resolve(settings.pop("name"))
    known = settings_of(cls)
    unknown = settings.keys() - known.keys() | ({"layers"} & settings.keys())
    if unknown or "layers" not in known:
        raise ValueError(
            f"Cross: {role} must be a policy with layers, and settings of {cls.__name__} other than those, "
            f"got {sorted(unknown) or 'none'}"
        )
    return construct(cls, {**({"seed": seed} if "seed" in known else {}), **settings, "layers": layers})

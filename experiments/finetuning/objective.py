"""What training minimises: the classification loss, the distance from the unpruned model, the policies' own losses."""

from typing import Any

import torch
from timm.data import Mixup
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.trace import Trace
from prunevit.vit import RaggedViT


class TeacherOutputs(dict[str, Tensor]):
    """`logits [B, K]` and `features [B, N, C]` of the unpruned model, computed once something asks for them."""

    def __init__(self, teacher: Any, images: Tensor) -> None:
        """Take the frozen model and the batch."""
        super().__init__()
        self.teacher, self.images = teacher, images

    def __missing__(self, name: str) -> Tensor:
        """Run the model."""
        with torch.no_grad():
            features = self.teacher.forward_features(self.images)
            self.update(features=features, logits=self.teacher.forward_head(features))
        return dict(self)[name]


class Objective:
    """The parts of the loss; each is already weighted."""

    def __init__(self, pruned: RaggedViT, teacher: nn.Module, config: FinetuneConfig) -> None:
        """Take the models.

        Args:
            pruned: What learns.
            teacher: A frozen copy of the unpruned model.
            config: Weights and smoothing.
        """
        self.pruned, self.teacher, self.config = pruned, teacher, config
        self.mixup = make_mixup(config, pruned.num_classes)

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images of a batch, if that is asked for.

        Args:
            images: `[B, 3, H, W]`, changed in place.
            targets: Class indices `[B]`.

        Returns:
            The images, and class indices or probabilities `[B, K]`.
        """
        if self.mixup is None:
            return images, targets
        even = len(images) // 2 * 2 or 2  # one may be left over where an image could not be read
        return self.mixup(images[:even], targets[:even])

    def parts(self, trace: Trace, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the loss.

        Args:
            trace: Of the pruned model on the images.
            images: `[B, 3, H, W]`.
            targets: Class indices `[B]`, or probabilities `[B, K]`.
        """
        logits = trace.logits.to(torch.promote_types(trace.logits.dtype, torch.float32))
        smoothing = 0.0 if self.mixup is not None else self.config.label_smoothing
        outputs = TeacherOutputs(self.teacher, images)
        found = {
            "class": cross_entropy(
                logits, targets.to(logits) if targets.ndim > 1 else targets, label_smoothing=smoothing
            )
        }
        if self.config.distillation_weight:
            found["distillation"] = self.config.distillation_weight * self._divergence(
                logits, outputs["logits"]
            )
        for policy in self.pruned.policies:
            found |= policy.losses(trace, outputs)  # type: ignore[operator]
        return found

    def _divergence(self, logits: Tensor, target: Tensor) -> Tensor:
        """T^2 KL(teacher || student) at temperature T (Hinton et al., 2015)."""
        tau = self.config.distillation_temperature
        student, teacher = (logits / tau).log_softmax(-1), (target.to(logits) / tau).log_softmax(-1)
        return tau**2 * kl_div(student, teacher, reduction="batchmean", log_target=True)


def make_mixup(config: FinetuneConfig, num_classes: int) -> Mixup | None:
    """Make timm's Mixup and CutMix, if either is asked for; it smooths the labels itself.

    Args:
        config: `mixup`, `cutmix`, `label_smoothing`.
        num_classes: Of the head.
    """
    if not (config.mixup or config.cutmix):
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
    )

"""See what goes through a training loop: batches, inputs of the model, losses, gradients, learning rates.

Each is looked at where it passes by, whatever loop there is around it: batches where a followed loader hands them out,
inputs where the model takes them, losses at `accelerator.backward`, gradients and learning rates at the optimizer's own
`step`, also of an optimizer that was never prepared. Only reads; draws no random number; not collective.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..live import get_raw_optimizer
from ..progress.follow import Follower, set_batch_observer
from ..rehearsal.records import EVALUATION, TRAINING
from ..steps import follow_steps
from .digests import digest_generators, digest_gradients, digest_samples, digest_values

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass
class Events:
    """What has gone through since the last update, in its order. Becomes a record as it is."""

    batches: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    generators_after_forward: list[dict[str, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # that the script passed to `step`
    backward_losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)  # that clipping has returned
    updates: list[dict[str, Any]] = field(default_factory=list)


class Watch:
    """Watches one accelerator."""

    def __init__(self, accelerator: Accelerator, *, looks_at_samples: bool) -> None:
        self._accelerator = accelerator
        self._looks_at_samples = looks_at_samples
        self._events = Events()
        self._numbers: dict[int, int] = {}  # of optimizers, in the order in which they were seen
        self._seen: list[Any] = []  # kept alive, so that no other takes an identity
        self._models: list[Any] = []
        self._followers: list[Follower] = []  # of loaders, in the order in which they were seen

    def start(self) -> None:
        """Begin. Models that are prepared later are watched from `follow_models` on."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        follow_steps(self._accelerator)  # it replaces `backward` too, and only where nobody has
        set_batch_observer(self._note_batch)
        register_optimizer_step_pre_hook(self._note_update)
        self._wrap("backward", self._note_backward)
        self._wrap("clip_grad_norm_", None, self._note_norm)
        self.follow_models()

    def follow_models(self) -> None:
        """Watch the models that were prepared since the last call."""
        for model in self._accelerator._models:
            if not any(model is each for each in self._models):
                self._models.append(model)
                model.register_forward_pre_hook(self._note_inputs, prepend=True, with_kwargs=True)

    def take(self) -> Events:
        """Return what has gone through since the last call, and begin anew."""
        events, self._events = self._events, Events()
        return events

    def note_loss(self, loss: Any) -> None:
        """Note a loss that the script reports."""
        if loss is not None:
            self._events.losses.append(_to_float(loss))

    def _wrap(self, name: str, before: Any, after: Any = None) -> None:
        original = getattr(self._accelerator, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        setattr(self._accelerator, name, method)

    def _note_batch(self, follower: Follower, batch: Any) -> None:
        position = follower.get_position()
        if follower not in self._followers:
            self._followers.append(follower)
        found: dict[str, Any] = {
            "loader": self._followers.index(follower),
            "use": None,  # what the model's next forward pass is for
            "digest": digest_values(batch),
            "indices": getattr(follower.current, "digest", None),
            "generators": digest_generators(),
            "epoch": position.epoch,
            "batch": position.batch,
        }
        if self._looks_at_samples:
            found["samples"] = digest_samples(batch)
        self._events.batches.append(found)

    def _note_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        import torch

        is_training = torch.is_grad_enabled()
        if self._events.batches:
            self._events.batches[-1]["use"] = TRAINING if is_training else EVALUATION
        if is_training:
            self._events.inputs.append(digest_values([list(args), kwargs]))

    def _note_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self._events.generators_after_forward.append(digest_generators())
        self._events.backward_losses.append(_to_float(loss))

    def _note_norm(self, norm: Any) -> None:
        if norm is not None:
            self._events.gradient_norms.append(_to_float(norm))

    def _note_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._numbers:
            self._numbers[id(optimizer)] = len(self._numbers)
            self._seen.append(optimizer)
        digest, norm = digest_gradients(optimizer)
        self._events.updates.append(
            {
                "optimizer": self._numbers[id(optimizer)],
                "class": type(optimizer).__name__,
                "is_prepared": any(get_raw_optimizer(each) is optimizer for each in self._accelerator._optimizers),
                "lrs": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                "num_states": len(optimizer.state),
                "gradients": digest,
                "norm": norm,
            }
        )


def _to_float(value: Any) -> float:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if hasattr(value, "detach"):
        value = value.detach().float().mean()
    return float(value)

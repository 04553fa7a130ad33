"""The optimizers of a stage: a global gradient clip, a schedule, master copies, and rules that update tensors.

Weights below float32 have float32 master copies, so that updates smaller than a weight's rounding add up. In a float16
run the loss is scaled (`loss_scale`), and all parameters have copies, in which the unscaled gradient is summed. The
whole state of an optimizer is a set of named tensors. What the rules keep of each parameter, and averages, can be in
the memory of the CPU between steps (`optimizer_offload`); copies, in which gradients are summed, stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.config.run import Optimizer
from posttrain.config.stages.stage import fits
from posttrain.core.exchange.ranks import ALONE, Ranks, check_same, joint_norm, of_one_copy
from posttrain.core.exchange.row_gradient import held, joined, whole
from posttrain.core.exchange.scores import ExpectedUpdate
from posttrain.engine.optimizer.loss_scale import WORDS, LossScale
from posttrain.engine.optimizer.optimizer_offload import OffloadedState, groups
from posttrain.engine.optimizer.update_rules import Moments, Momentum, Orthogonal, UpdateRule
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError

NOT_HIDDEN = ("embed*", "*_embed*", "wte", "wpe", "lm_head", "embed_out", "value_head", "reward_head")
"""Patterns of matrices that Muon leaves to AdamW: they turn tokens or positions into vectors, or vectors into scores,
and their singular directions mean nothing together. A pattern fits a word of a name: `embed*` fits
`model.embed_tokens.weight`, `*_embed*` fits `word_embeddings.weight`, `wte` and `wpe` are GPT-2's."""

ELEMENTWISE = ("adamw", "sgd")
"""The kinds whose update of a number depends on nothing but that number's gradient and state, and the clip."""

CLIP_EPS = 1e-6
"""The number that torch adds to a norm before it divides by the norm."""
Rules = type[UpdateRule]


class GradientParts(Protocol):
    """A learner whose ranks split some weights and hold others whole. It reads gradients, by name, of both kinds."""

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Returns the norm of the gradients of all ranks together."""
        ...

    def agree(self, gradients: Mapping[str, Tensor]) -> None:
        """Overwrite the gradients of weights that every rank holds whole with those of the first rank."""
        ...


class StageOptimizer:
    """Steps on the gradients that the parameters hold. Weight decay applies to every parameter that is not frozen.

    Args:
        parameters: by name, in a fixed order; float32, float64, or a narrower dtype with a master copy. A step does not
            change parameters without a gradient, nor those that `config` freezes.
        scaled: whether losses are scaled, because the model computes in float16.
        home: where moments and averages are between steps; None: on the device of their parameters.
        ranks: the processes that train together. The parameters are then this rank's parts of the weights.
        parts: the learner of these tensors, where its ranks split some weights and hold others whole
            (`tensor_parallel`); None: any other learner.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: Optimizer,
        kernels: KernelChoice = "auto",
        scaled: bool = False,
        home: torch.device | None = None,
        ranks: Ranks = ALONE,
        parts: GradientParts | None = None,
    ) -> None:
        self.parts = parts
        if (ranks.world > 1 or parts is not None) and config.kind not in ELEMENTWISE:
            raise ConfigError(
                f"optimizer.kind={config.kind} reads more of a weight than one rank has, and is not built for"
                f" several ranks. Set it to {' or '.join(ELEMENTWISE)}, or train in one process"
            )
        self.config, self.ranks = config, ranks
        self._home = OffloadedState(home)
        self._scale = LossScale() if scaled else None
        self.steps = 0
        """Optimizer steps taken."""
        self._frozen = [p for n, p in parameters.items() if config.frozen(n)]
        self._parameters = {n: p for n, p in parameters.items() if not config.frozen(n)}
        # With a scaled loss float32 parameters are copied too: `gather` divides their gradients on the way to a copy.
        copied = {n: p for n, p in self._parameters.items() if scaled or p.dtype.itemsize < 4}
        self._masters = {
            n: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for n, p in copied.items()
        }
        # What steps update, and what the norm, the clip and the averages read.
        self._moved = {n: self._masters.get(n, p) for n, p in self._parameters.items()}
        self._rules: dict[str, UpdateRule] = {}
        for rule, names in self._rules_of_parameters():
            built = rule({n: self._moved[n] for n in names}, config, {n: config.rate(n) for n in names}, kernels)
            self._rules |= dict.fromkeys(names, built)
        averaged_tensors = self._moved.items() if config.ema is not None else ()
        self._average = {n: self._home.stored(t.detach().clone()) for n, t in averaged_tensors}

    def rule_of(self, name: str, tensor: Tensor) -> Rules:
        """Returns the rule that updates a parameter."""
        match self.config.kind:
            case "adamw":
                return Moments
            case "adamw8bit":
                from posttrain.engine.optimizer.eight_bit import QuantisedMoments

                return QuantisedMoments
            case "muon":
                return Orthogonal if hidden_matrix(name, tensor) else Moments
            case "sgd":
                return Momentum

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of parameters without a factor of their own."""
        return self.config.lr * self.config.share(self.steps + 1)

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss of the next backward pass is multiplied."""
        return 1.0 if self._scale is None else self._scale.value

    def words(self) -> str:
        """Returns a line for people about what is unusual in the optimizer; '' where nothing is."""
        out: list[str] = []
        moved = len(self._moved)
        if self.config.kind == "muon":
            by_muon = sum(isinstance(rule, Orthogonal) for rule in self._rules.values())
            out.append(
                f"Muon updates {by_muon} matrices, and AdamW the other {moved - by_muon} tensors; Muon is not exact"
            )
        elif self.config.kind != "adamw":
            out.append(f"{self.config.kind} updates {moved} tensors")
        if self._frozen:
            out.append(f"{len(self._frozen)} of {moved + len(self._frozen)} tensors are frozen")
        if self._scale is not None:
            out.append(f"the loss is scaled by {self._scale.value:g} at first")
        if self.config.ema is not None:
            out.append(f"a moving average of the weights is kept (decay {self.config.ema:g})")
        if self._home.device is not None:
            out.append(f"its state is in the memory of the {self._home.device.type.upper()} between steps")
        return "; ".join(out)

    def pending_bytes(self) -> int:
        """Bytes of state that the next step will add on the device: the whole state before the first step, and then
        nothing. Where it is elsewhere between steps, that of the largest group of parameters, in every step."""
        size: dict[UpdateRule, int] = {}
        for name, rule in self._rules.items():
            if self._home.device is not None or not rule.state(name):
                # With a home each rule is one group of parameters, whose state is on the device in its turn alone.
                size[rule] = size.get(rule, 0) + rule.bytes(name)
        return sum(size.values()) if self._home.device is None else max(size.values(), default=0)

    def trained(self) -> dict[str, Tensor]:
        """The tensors that a step updates, by parameter: its float32 master where there is one, else itself."""
        return dict(self._moved)

    def averaged(self) -> dict[str, Tensor]:
        """The moving averages of the weights, by parameter; empty where none are kept."""
        return dict(self._average)

    def step(self, share: float = 1.0) -> float:
        """Clip the gradients globally, update with this share of the learning rate, and clear them. Returns the norm
        before the clip. If it is not finite, nothing changes but a scale of the loss, and the step is not counted."""
        # Weights may have been loaded since the last step, and a stale master would bring the old ones back.
        self._follow_weights()
        self.gather()
        with_grad = [t for t in self._moved.values() if t.grad is not None]
        norm = self._norm(with_grad)
        size = float(norm)
        if math.isfinite(size):
            # Within the clip nothing is multiplied, which saves a pass over all gradients.
            if size > self.config.clip:
                self._clip(with_grad, norm)
            lr = self.lr * share
            # Each rule once, in order: many parameters share one.
            for rule in dict.fromkeys(self._rules.values()):
                self._step(rule, lr)
            self.steps += 1
            self._publish_masters()
            self._follow_average()
            # Copies to pinned memory return before they are done, and a checkpoint may read it next.
            self._home.wait(norm.device)
        if self._scale is not None:
            self._scale.after(size)
        for t in (*self._moved.values(), *self._parameters.values()):
            t.grad = None
        return size

    def expected_update(
        self,
        config: Optimizer,
        name: str,
        gradient: Tensor,
        norm: float,
        at: int | None = None,
        share: float = 1.0,
    ) -> ExpectedUpdate:
        """The update of the parameter's rule with a global clip and the schedule, in float64; see
        `role.trainer.WeightOptimizer`."""
        if config.kind != self.config.kind:
            raise InvariantError(f"the stage asks for the optimizer {config.kind}, and {self.config.kind} was built")
        scale = min(1.0, config.clip / norm) if norm > 0 else 1.0
        lr = config.lr * config.share(self.steps + 1) * config.rate(name) * share
        return self._rules[name].expected(config, name, gradient, scale, lr, at)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as tensors for safetensors: step counts, moments, masters, averages."""
        out = {"steps": torch.tensor(self.steps)}
        for name, rule in self._rules.items():
            out |= {f"{word}.{name}": part for word, part in rule.state(name).items()}
        out |= {f"master.{name}": master for name, master in self._masters.items()}
        out |= {} if self._scale is None else self._scale.state()
        return out | {f"ema.{name}": average for name, average in self._average.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors`, bit for bit. The weights themselves are loaded separately.

        Raises:
            RunFolderError: the state belongs to other parameters, or to another kind of optimizer.
        """
        # Every tensor that has a place is taken out of `left`, so what remains is foreign. All is checked before
        # anything changes: a state that does not fit leaves the optimizer as it was.
        left = dict(tensors)
        steps = left.pop("steps", None)
        scale = {word: left.pop(word) for word in WORDS if self._scale is not None and word in left}
        new: dict[str, dict[str, Tensor]] = {}
        for name, rule in self._rules.items():
            forms = rule.forms(name)
            parts = {word: left.pop(f"{word}.{name}") for word in forms if f"{word}.{name}" in left}
            # No part at all is right too: the parameter has had no update yet.
            complete = len(parts) in (0, len(forms))
            if not complete or any(forms[word] not in (None, part.shape) for word, part in parts.items()):
                raise RunFolderError(_message_of_misfit(name))
            new[name] = parts
        # Masters and averages are here from the beginning, so each must be stored, in its shape.
        copies = {f"master.{n}": t for n, t in self._masters.items()}
        copies |= {f"ema.{n}": t for n, t in self._average.items()}
        stored = {name: left.pop(name, None) for name in copies}
        foreign = [*left, *(n for n, t in stored.items() if t is None or t.shape != copies[n].shape)]
        missing = ["steps"] * (steps is None) + ["loss_scale"] * (self._scale is not None and len(scale) < len(WORDS))
        if steps is None or missing or foreign:
            raise RunFolderError(_message_of_misfit([*foreign, *missing][0]))
        self.steps = int(steps)
        if self._scale is not None:
            self._scale.load(scale)
        for name, rule in self._rules.items():
            # Without stored parts the parameter begins anew, whatever it held before.
            rule.inner.state.pop(rule.tensors[name], None)
            if new[name]:
                rule.load(name, new[name])
                tensor = rule.tensors[name]
                rule.inner.state[tensor] = {word: self._home.stored(x) for word, x in rule.inner.state[tensor].items()}
        for name, tensor in stored.items():
            if tensor is not None:
                copies[name].copy_(tensor)

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of weights to their masters', in float32 and without the scale of the loss. Those of frozen
        parameters are dropped. One of rows becomes whole where its rule cannot read rows, or its state is elsewhere."""
        for p in self._frozen:
            p.grad = None
        for name, master in self._masters.items():
            p = self._parameters[name]
            if p.grad is not None:
                gradient = p.grad.to(master.dtype)
                # Converted before it is divided: in float16 small quotients would be 0, which the scale is to prevent.
                gradient = gradient if self._scale is None else gradient.mul_(1 / self._scale.value)
                if master.grad is None:
                    master.grad = gradient
                else:
                    # A gradient of rows can be added to a dense one, and not the other way around.
                    master.grad = gradient.add_(master.grad) if master.grad.is_sparse else master.grad.add_(gradient)
                p.grad = None
        for name, t in self._moved.items():
            if t.grad is not None and t.grad.is_sparse:
                # Rows of several micro-batches may repeat; joined, each row stands once, in order.
                t.grad = joined(t.grad) if self._rules[name].takes_rows and self._home.device is None else whole(t.grad)

    def agree(self) -> None:
        """Give weights that every rank holds whole the gradients of the first rank, so that their copies stay equal."""
        if self.parts is not None:
            self.parts.agree(self._gradients())

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients of the tensors that a step updates, by parameter."""
        return {n: t.grad for n, t in self._moved.items() if t.grad is not None}

    def _norm(self, tensors: list[Tensor]) -> Tensor:
        """The norm of the gradients of all ranks together.

        Raises:
            InvariantError: the ranks have taken different numbers of steps, step at different learning rates, or copies
                of the weights differ.
        """
        if self.parts is not None:
            return next(iter(self._moved.values())).new_tensor(self.parts.norm(self._gradients()))
        # The numbers of a gradient of rows are enough, since the rest is 0.
        own_norm = torch.nn.utils.get_total_norm([held(t.grad) for t in tensors if t.grad is not None])
        if self.ranks.world == 1:
            return own_norm
        advice = "One of them left out an update, so its part of the weights is stale: go on from the last checkpoint"
        check_same(self.ranks, (self.steps, self.lr), "number of optimizer steps and learning rate", advice)
        if getattr(self.ranks, "replicas", 1) > 1:  # gradients are summed over copies, and do not tell that one moved
            of_one_copy(self.ranks, float(torch.nn.utils.get_total_norm(list(self._moved.values()))), "weights")
        return own_norm.new_tensor(joint_norm(of_one_copy(self.ranks, float(own_norm), "gradient")))

    def _clip(self, tensors: list[Tensor], norm: Tensor) -> None:
        """Multiply the gradients, whose norm is `norm`, so that their norm becomes the configured one."""
        gradients = [t.grad for t in tensors if t.grad is not None]
        # Gradients of rows are multiplied below, by the formula of torch's function.
        dense = [t for t, g in zip(tensors, gradients, strict=True) if not g.is_sparse]
        torch.nn.utils.clip_grads_with_norm_(dense, self.config.clip, norm)
        for g in gradients:
            if g.is_sparse:
                held(g).mul_(self.config.clip / (norm + CLIP_EPS))

    def _rules_of_parameters(self) -> Iterator[tuple[Rules, list[str]]]:
        """Each kind of rule with the names of its parameters; once per group where state is elsewhere between steps."""
        by_rule: dict[Rules, list[str]] = {}
        for name, tensor in self._moved.items():
            by_rule.setdefault(self.rule_of(name, tensor), []).append(name)
        for rule, names in by_rule.items():
            of_rule = {n: self._moved[n] for n in names}
            for group in [names] if self._home.device is None else groups(of_rule):
                yield rule, group

    def _step(self, rule: UpdateRule, lr: float) -> None:
        """Let one rule step, while its state is on the device."""
        with self._home.fetched(rule.inner.state, [t for t in rule.tensors.values() if t.grad is not None]):
            rule.step(lr)

    @torch.no_grad()
    def _follow_weights(self) -> None:
        """Copy weights that were replaced from outside to their masters."""
        for name, master in self._masters.items():
            p = self._parameters[name]
            # A master that rounds to the weight has made it. Otherwise the weight came from elsewhere, and the digits
            # that the master has beyond it belong to other weights.
            if not torch.equal(master.to(p.dtype), p):
                master.copy_(p)

    @torch.no_grad()
    def _publish_masters(self) -> None:
        """Copy every master to its weight, rounded to the weight's dtype."""
        for name, master in self._masters.items():
            self._parameters[name].copy_(master)

    @torch.no_grad()
    def _follow_average(self) -> None:
        """Move the averages towards the weights: a = ema a + (1 - ema) w."""
        if self.config.ema is None:
            return
        for name, average in self._average.items():
            self._home.average(average, self._moved[name], 1 - self.config.ema)


def hidden_matrix(name: str, tensor: Tensor) -> bool:
    """Returns whether a parameter is a matrix between embedding and head, which Muon updates."""
    return tensor.ndim == 2 and min(tensor.shape) > 1 and not any(fits(p, name) for p in NOT_HIDDEN)


def _message_of_misfit(name: str) -> str:
    """The message for a state with a tensor that does not belong to this optimizer, or without one that does."""
    return (
        f"the optimizer state is of other parameters ({name!r} does not fit): resume with the model and stage the run"
        " was started with"
    )

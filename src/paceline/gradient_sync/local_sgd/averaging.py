"""Local SGD and DiLoCo: workers train independently, and average weights every few steps.

Letters: A the anchor, the weights that all workers have in common; w_i a worker's own weights;
m the mean of all w_i - A; H the steps between two averages of a part; D its delay.

Phases, for each part of the model. 1: every H steps the workers send w_i - A. 2: they go on
training, for D steps. 3: the outer step takes m over, A' = A + m with `local`; with `diloco` by
SGD with Nesterov momentum, whose gradient is -m. 4: what a worker trained meanwhile is kept:
w_i + (A' - w_i as it was sent); with D = 0 that is A'.

Sources: Lin et al., "Don't use large mini-batches, use local SGD", 2018 (arXiv 1808.07217);
Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105), and "Streaming DiLoCo", 2025 (2501.18512).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.local_sgd.exchange import AverageInFlight, LocalExchange
from paceline.gradient_sync.local_sgd.layout import LocalLayout
from paceline.gradient_sync.local_sgd.schedule import LocalTerms

Parameters = Callable[[], Mapping[str, nn.Parameter]]


@final
@dataclass(frozen=True, kw_only=True)
class LocalState:
    """State of the averaging between two averages, for snapshots."""

    shared: dict[str, Tensor]
    """The same on every worker: anchor, velocity, averages that have arrived early."""
    own: dict[str, Tensor]
    """This worker's: weights, and what has been sent."""
    values: dict[str, object]
    """JSON, the same on every worker."""


@final
class LocalSteps:
    """Averages the workers' weights, a part of the model at a time, while they go on training."""

    def __init__(self, terms: LocalTerms, group: Group, parameters: Parameters) -> None:
        """Connect the workers for averages, and start a thread that `release` ends. Collective.

        Args:
            terms: Schedule and outer optimizer.
            group: The workers.
            parameters: Names all parameters of the models.

        Raises:
            UsageError: The backend can't carry what is asked for.
        """
        self.is_apart = False
        """Whether a local step has been taken since all workers were alike."""
        self._terms = terms
        self._group = group
        self._parameters = parameters
        self._exchange = LocalExchange(group, terms.precision)
        self._is_exact = terms.plan.delay == 0 and self._exchange.owes == 0
        """Whether a part is the same on all workers once its average has been taken over."""
        self._is_even = True
        """Whether the weights are alike, whatever the optimizers hold."""
        self._underway: dict[int, AverageInFlight] = {}
        """Parts on their way, in the order in which they left."""
        self._hold(LocalLayout({}, terms.plan.parts, self._exchange.multiple))

    @property
    def waited_s(self) -> float:
        """How long steps have waited for averages."""
        return self._exchange.waited_s

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent for averages, on the wire."""
        return self._exchange.sent_bytes

    def start(self) -> None:
        """Begin a round: the weights, alike on all workers, become the anchor. Local.

        What is trained now is averaged until the next round. What is frozen stays as it is, and
        its velocity is dropped.
        """
        self._lay_out(frozenset(n for n, p in self._parameters().items() if p.requires_grad))
        self._layout.read(None, self._anchor)
        self.is_apart, self._is_even = False, True

    def moved(self) -> None:
        """Note that weights may have changed since the last step: one is under way. Local."""
        self.is_apart, self._is_even = True, False

    def after(self, step: int) -> None:
        """Send and take over what is due after a local step. Collective; blocks where it is late.

        Args:
            step: Of this round, from 1.
        """
        plan = self._terms.plan
        leaving = plan.leaving(step)
        self.is_apart = True
        # With a delay what arrives has left earlier; without one what leaves now is waited for.
        if plan.delay:
            self._apply(plan.arriving(step), in_step=True)
            self._send(leaving, rounded=True)
        else:
            self._send(leaving, rounded=True)
            self._apply(leaving, in_step=True)
        self._is_even = self._is_exact and len(leaving) == plan.parts

    def agree(self) -> None:
        """End a round: all workers get the mean of all weights. Collective.

        It isn't rounded for the way, and no outer step: that one's size is meant for a whole round.
        What is under way is taken over first; where the weights are alike then, nothing is done.

        Raises:
            JobError: A parameter was thawed within the round, and has been trained by itself.
        """
        if not self.is_apart:
            return
        self._refuse_thawed()
        parts = range(self._terms.plan.parts)
        # Phases 3 and 4 for what is under way, then a plain average of everything that still
        # differs.
        self._apply(tuple(self._underway))
        if not self._is_even:
            self._send(parts, rounded=False)
            for travel in self._underway.values():
                self._exchange.finish(travel)
            self._underway = {}
            # A + mean(w_i - A) = mean(w_i)
            self._anchor.add_(self._mean)
            self._layout.write(None, self._anchor)
        self.is_apart, self._is_even = False, True

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the average of all workers' weights into the models. Collective on entry."""
        if self._is_even:
            yield
            return
        # Buffers of its own: averages that are under way keep theirs.
        own = self._layout.zeros(self._group.device)
        self._layout.read(None, own)
        mean = torch.zeros_like(own)
        travel = AverageInFlight(sent=own, mean=mean, anchor=self._anchor, owed=own.new_empty(0))
        self._exchange.finish(self._exchange.start(travel, rounded=False))
        self._layout.write(None, mean.add_(self._anchor))
        # The worker's own weights come back even if what runs with the average fails.
        try:
            yield
        finally:
            self._layout.write(None, own)

    def state(self) -> LocalState:
        """Give what a snapshot has to hold; in the midst of a round, that of this worker as well.

        Collective: averages that are under way arrive, but aren't taken over.
        """
        # Between rounds all workers are alike, and the outer momentum is all there is.
        shared: dict[str, Tensor] = {}
        if self._velocity is not None:
            shared |= self._named("velocity", self._velocity)
        if not self.is_apart:
            return LocalState(shared=shared, own={}, values={})
        # Within a round each worker has its own weights, and the anchor that they are compared
        # with.
        layout = self._layout
        own = {f"weights/{n}": p.detach() for n, p in layout.parameters.items()}
        shared |= self._named("anchor", self._anchor)
        if self._exchange.owes:
            own["owed"] = self._owed
        # Averages under way are saved as what they come to: another start need not send them again.
        for travel in self._underway.values():
            self._exchange.finish(travel)
        if self._underway:
            shared |= self._named("mean", self._mean)
            own |= self._named("sent", self._sent)
        values = {
            "terms": self._terms.describe(),
            "underway": list(self._underway),
            "is_even": self._is_even,
        }
        return LocalState(shared=shared, own=own, values=values)

    def fits(self, values: Mapping[str, object]) -> bool:
        """Tell whether a saved round can be gone on with: it had the same terms."""
        return values.get("terms") == self._terms.describe()

    @torch.no_grad()
    def restore(self, saved: LocalState) -> None:
        """Go on from what `state` gave. Local to the worker."""
        velocity = _inner("velocity", saved.shared)
        # A script thaws parameters when its epoch begins; until then they keep their velocity.
        self._lay_out(frozenset(_inner("weights", saved.own)) or frozenset(velocity))
        # What is new in this model keeps the zeros of a fresh velocity.
        if self._velocity is not None:
            self._layout.put(self._velocity, self._layout.named(self._velocity) | velocity)
        # The snapshot was made between two rounds.
        if not saved.own:
            return
        for name, value in _inner("weights", saved.own).items():
            self._layout.parameters[name].copy_(value)
        self._layout.put(self._anchor, _inner("anchor", saved.shared))
        if self._exchange.owes:
            self._owed.copy_(saved.own["owed"])
        # They have arrived already, so nothing is sent: `_apply` takes them over when they are due.
        underway = saved.values["underway"]
        assert isinstance(underway, list)
        if underway:
            self._layout.put(self._mean, _inner("mean", saved.shared))
            self._layout.put(self._sent, _inner("sent", saved.own))
        self._underway = {part: self._travel(part) for part in underway}
        self.is_apart, self._is_even = True, bool(saved.values["is_even"])

    def release(self) -> None:
        """End the thread of the averages. Local to the worker."""
        self._exchange.release()

    def _send(self, parts: Iterable[int], *, rounded: bool) -> None:
        for part in parts:
            if not self._layout.is_empty(part):
                self._layout.read(part, self._sent)
                travel = self._exchange.start(self._travel(part), rounded=rounded)
                self._underway[part] = travel

    def _apply(self, parts: Iterable[int], *, in_step: bool = False) -> None:
        for part in parts:
            travel = self._underway.pop(part, None)
            if travel is None:
                continue  # no weights, or a resumed training that has nothing under way
            self._exchange.finish(travel, in_step=in_step)
            self._step(part)
            # Phase 4. With D = 0 and no rounding A' itself; else what was trained meanwhile stays
            # on top.
            if self._is_exact:
                self._layout.write(part, self._anchor)
            else:
                # A' - (w_i as it was sent), which is added to w_i
                torch.sub(travel.anchor, travel.sent, out=travel.sent)
                self._layout.add(part, self._sent)

    def _step(self, part: int) -> None:
        """Take the outer step of a part."""
        chosen, terms = self._layout.slice_of(part), self._terms
        anchor, mean = self._anchor[chosen], self._mean[chosen]
        # Nesterov momentum as in torch.optim.SGD with the gradient -m:
        # v' = mu v + m, A' = A + lr (m + mu v').
        anchor.add_(mean, alpha=terms.outer_lr)
        if self._velocity is not None:
            velocity = self._velocity[chosen].mul_(terms.outer_momentum).add_(mean)
            anchor.add_(velocity, alpha=terms.outer_lr * terms.outer_momentum)

    def _travel(self, part: int) -> AverageInFlight:
        chosen, owes = self._layout.slice_of(part), self._exchange.owes
        size = self._layout.part_size // owes if owes else 0
        return AverageInFlight(
            sent=self._sent[chosen],
            mean=self._mean[chosen],
            anchor=self._anchor[chosen],
            owed=self._owed[part * size : (part + 1) * size],
        )

    def _lay_out(self, names: frozenset[str]) -> None:
        """Make room for these parameters; those that stay keep their velocity."""
        chosen = {name: p for name, p in self._parameters().items() if name in names}
        if chosen.keys() == self._layout.parameters.keys():
            return
        known = {} if self._velocity is None else self._layout.named(self._velocity)
        self._hold(LocalLayout(chosen, self._terms.plan.parts, self._exchange.multiple))
        if self._velocity is not None:
            fresh = self._layout.named(self._velocity)
            self._layout.put(self._velocity, fresh | known)

    def _hold(self, layout: LocalLayout) -> None:
        device, owes = self._group.device, self._exchange.owes
        self._layout = layout
        self._anchor, self._sent, self._mean = (layout.zeros(device) for _ in range(3))
        self._velocity = layout.zeros(device) if self._terms.outer_momentum else None
        self._owed = torch.zeros(layout.size // owes if owes else 0, device=device)

    def _named(self, kind: str, flat: Tensor) -> dict[str, Tensor]:
        return {f"{kind}/{name}": view for name, view in self._layout.named(flat).items()}

    def _refuse_thawed(self) -> None:
        known = self._layout.parameters
        # Thawed within a round, a parameter has no anchor that its difference could be taken to.
        new = [n for n, p in self._parameters().items() if p.requires_grad and n not in known]
        if new:
            raise JobError(
                f"{new[0]} was thawed in the midst of a pass over the training loader, and each "
                "worker has trained it by itself. With --sync local or diloco, thaw parameters "
                "between two passes"
            )


def _inner(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take one kind's tensors out, by parameter."""
    start = f"{kind}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}

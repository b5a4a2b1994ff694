"""A worker's handle on the training that it is part of; the same on 1 process and on 1,000."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, cast, final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.data.augment import Augment
from paceline.data.batch import BatchSource
from paceline.errors import UsageError
from paceline.gradient_sync.replica import Replica
from paceline.training.batches.loader import (
    EvalLoader,
    Loader,
    Open,
    eval_batch_size,
)
from paceline.training.batches.loop_checks import EARLY, LATE_LOADER, refuse_further
from paceline.training.batches.plan import check_plan, make_plan
from paceline.training.batches.sources import (
    AnyData,
    DataSource,
    batch_of,
    compare_data,
    describe_data,
    make_source,
    shuffles,
)
from paceline.training.components import forward_of, place_model
from paceline.training.config import TrainConfig, compare_given
from paceline.training.engine import Engine
from paceline.training.evaluation.distributed_mean import BatchMetrics, Metrics, average
from paceline.training.gathering import gathered
from paceline.training.snapshots.script_state import KeptValues, Stateful, check_given

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Scheduler = TypeVar("Scheduler", bound=LRScheduler)
AnyStateful = TypeVar("AnyStateful", bound=Stateful)
Registered = TypeVarTuple("Registered")
Value = TypeVar("Value", int, bool, str, float)


@final
class Session:
    """The handle that training loops are written with: a script's, and Paceline's own.

    Methods that say "collective" are called by every worker, in the same order, and block.
    """

    def __init__(
        self,
        engine: Engine,
        given: frozenset[str] = frozenset(),
        *,
        unseeded: bool = False,
    ) -> None:
        """Create the session.

        Args:
            engine: What runs underneath.
            given: Names of the options that the command line or the environment gave.
            unseeded: Whether torch has drawn random numbers without a seed before the session.
        """
        self.engine = engine
        self._context = engine.context
        self.rank = engine.context.group.rank
        self.is_main = self.rank == 0  # the worker that writes files and prints
        self.world_size = engine.context.group.world_size
        self.local_rank = engine.context.group.placement.local_rank
        self.device = engine.context.group.device
        self._given = given
        self._seeded = torch.get_rng_state() if unseeded else None
        self._others: list[Loader] = []
        self._eval_loaders: dict[int, EvalLoader] = {}
        self._end: Callable[[BaseException | None], None] | None = None
        self.is_in_loop = False
        """Whether the script is within its loop over epochs or steps."""

    @property
    def config(self) -> TrainConfig:
        """All options, as far as they are settled."""
        return self._context.config

    # Its end

    def ends_by(self, end: Callable[[BaseException | None], None]) -> None:
        """Register what `close` and the end of a `with` block call, with the error if any."""
        self._end = end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._end is not None:
            self._end(error)

    def close(self) -> None:
        """End the session: wait for its snapshots, write summary and report. Collective.

        The end of a `with` block does it, and of the script, where neither has been before.
        """
        self.__exit__(None, None, None)

    # What a training consists of

    def model(self, module: Model, *, name: str = "model") -> Model:
        """Take a model into the training. Collective.

        It is moved to the worker's device and starts from rank 0's weights; its gradients will be
        those of the whole global batch. The module stays the object it is: names, attributes and
        methods are its own.

        Args:
            module: Built the same on every worker.
            name: Of this model, where there are several: `generator`, say.

        Raises:
            JobError: The workers' modules differ.
            UsageError: There is a model of this name, or the training has begun.
        """
        self._before_begin("s.model")
        components, compute = self._context.components, self.config.compute
        components.check_name(name)
        if self._seeded is not None and torch.equal(self._seeded, torch.get_rng_state()):
            components.unseeded.append(name)  # nothing has been drawn since: it was built before
        context = self._context
        ready = place_model(module, compute, context.group)
        forward = forward_of(ready, compute, context.group, exact=context.division.is_fixed)
        context.replicas.append(Replica(ready, context.group, forward))
        components.models[name] = ready
        return ready  # type: ignore[return-value]  # another module only where it is a BatchNorm

    def prepare(self, *components: *Registered) -> tuple[*Registered]:
        """Take models, optimizers, schedulers and torch DataLoaders in at once. Collective.

        Args:
            components: As a script on one process has them. A DataLoader that shuffles, or reads a
                stream, becomes a `loader`; any other an `eval_loader`. None stays None.

        Returns:
            What takes their place, in the same order; of one a tuple of one: `(model,) = ...`.

        Raises:
            UsageError: One is something else.
        """
        return cast(tuple[*Registered], tuple(map(self._register, components)))

    def optimizer(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Take an optimizer into the training: `step` uses it, snapshots hold its state.

        Its own `step()` and `zero_grad()` work behind `backward`.
        """
        self._before_begin("s.optimizer")
        self._context.components.optimizers.append(optimizer)
        self._context.optimizer_step.add_optimizer(optimizer, self.engine.update_by_script)
        return optimizer

    def ema(self, decay: float) -> None:
        """Keep a moving average of all models' weights, as the option `ema` does.

        It is updated after each step, as torch's `AveragedModel`; buffers are those of training.

        Raises:
            UsageError: It isn't between 0 and 1.
        """
        self._before_begin("s.ema")
        self.engine.set_ema(self._settle("ema", decay))

    def scheduler(self, scheduler: Scheduler) -> Scheduler:
        """Keep a learning-rate scheduler's state in snapshots; the script steps it itself."""
        self._before_begin("s.scheduler")
        self._context.components.schedulers.append(scheduler)
        return scheduler

    @overload
    def keep(self, part: AnyStateful, *, name: str, per_worker: bool = False) -> AnyStateful: ...

    @overload
    def keep(
        self, part: None = None, *, name: str | None = None, per_worker: bool = False, **values: Any
    ) -> KeptValues: ...

    def keep(
        self,
        part: Stateful | None = None,
        *,
        name: str | None = None,
        per_worker: bool = False,
        **values: Any,  # numbers, text, tensors, lists ...
    ) -> Stateful:
        """Keep state of the script's own in snapshots: an object's, or plain values.

        `kept = s.keep(best=0.0)` gives an object with an attribute `best`, which is read and set in
        the loop, and is what the snapshot has once the training has begun.

        Args:
            part: Anything with `state_dict` and `load_state_dict`.
            name: Of the part; of values it is their names by default.
            per_worker: Each worker has a state of its own, such as the hidden state of a recurrent
                network, for the same number of workers; with shards each shard, for any number.
                Otherwise it is alike on all workers, and rank 0's is saved.
            values: Numbers, text, None, tensors, and lists, tuples and dictionaries of these.

        Raises:
            UsageError: The name is taken, or the training has begun.
        """
        self._before_begin("s.keep")
        check_given(part, name, values)
        kept, components = KeptValues(values) if part is None else part, self._context.components
        components.keep(name or ", ".join(values), kept, per_worker=per_worker)
        return kept

    def loader(
        self,
        data: AnyData,
        *,
        global_batch: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        augment: tuple[Augment, ...] = (),
    ) -> Loader:
        """Serve training data: every sample once an epoch, over all workers. Collective.

        Args:
            data: A map-style or iterable data set, a `TensorData`, or a torch DataLoader as one
                process would use it, whose batch size is then the global batch.
            global_batch: Samples of one step over all workers; the same on any number of them.
            shuffle: Whether each epoch has an order of its own; yes by default.
            drop_last: Leave out the short batch at the end of an epoch.
            augment: Random changes on the device, for `TensorData`.

        Raises:
            UsageError: Script and command line disagree; a second loader with shards.
            JobError: The workers' data sets have different sizes.
        """
        self._before_begin("s.loader")
        served = describe_data(data, self.config.loop.seed)
        options = self.config.data
        batch = batch_of(served, global_batch, trains=True)
        if batch is not None:
            options = replace(options, global_batch=self._settle("global_batch", batch))
        drops = drop_last if drop_last is not None else served.drop_last or None
        if drops is not None:
            options = replace(options, drop_last=self._settle("drop_last", drops))
        samples = served.num_samples()
        plan = make_plan(
            options,
            self._context.division,
            None if served.is_stream else samples,
            shuffle=shuffles(served, shuffle),
            batch_sizes=served.batch_sizes,
        )
        # The first loader drives the engine's steps; of a further one batches are only read.
        context, first = self._context, self._context.components.train_loader is None
        compare_data(served, context.group, plan)
        refuse_further(options.shards, is_first=first)
        drive, seed = self.engine.steps if first else None, self.config.loop.seed
        made = Loader(self._opener(served, augment), served, plan, seed, self.rank, drive)
        context.components.loaders.append(made)
        if first:
            context.progress.plan = plan
            context.config = replace(context.config, data=options)
        else:
            self._others.append(made)
            self.keep(made, name=f"loader-{len(self._others)}")
        return made

    def eval_loader(
        self,
        data: AnyData,
        *,
        batch_size: int | None = None,
        evaluate_with: tuple[Augment, ...] = (),
    ) -> EvalLoader:
        """Serve data to evaluate on: every sample exactly once, in its own order. Collective.

        Args:
            data: As for `loader`.
            batch_size: Samples of one worker's batch; settles memory and speed, never the result.
            evaluate_with: Changes on the device that aren't random, for data as with `augment`:
                a resize.
        """
        served = describe_data(data, self.config.loop.seed)
        batch = batch_of(served, batch_size, trains=False)
        made = self._eval_loader(served, batch, evaluate_with)
        compare_data(served, self._context.group)
        progress = self._context.progress
        progress.val_samples = progress.val_samples or served.num_samples()
        return made

    def _eval_loader(
        self, served: DataSource, batch_size: int | None, evaluate_with: tuple[Augment, ...] = ()
    ) -> EvalLoader:
        context, most = self._context, self.config.data.max_batch_per_worker
        size = eval_batch_size(batch_size, context.progress.plan, most)
        opener, check = self._opener(served, (), evaluate_with), self.engine.check_eval_batch
        made = EvalLoader(opener, served, size, self.rank, context.division, check)
        context.components.loaders.append(made)
        return made

    # Training

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Go through the epochs that are left, from the newest snapshot on. Collective.

        Counts from 0. After the body of each: figures are recorded, a snapshot is taken, and it is
        decided whether to go on (number of epochs, target accuracy, patience, time budget).

        Args:
            count: Passes over the training set; by default the option `epochs`.

        Raises:
            UsageError: Script and command line disagree on the number.
            InterruptedTraining: A signal came; what was trained is saved.
        """
        if count is not None:
            self.engine.set_epochs(self._settle("epochs", count))
        self._begin()
        return self._loop(self.engine.epochs())

    def _loop(self, turns: Iterator[int]) -> Iterator[int]:
        """Go through turns, and note whether the script is within them."""
        self.is_in_loop = True
        try:
            yield from turns
        except GeneratorExit:
            self._context.script.has_left = True
            raise
        finally:
            self.is_in_loop = False

    def steps(self, count: int) -> Iterator[int]:
        """Go through the steps that are left of a loop without a training loader. Collective.

        Counts from 0. Each turn of the loop is a step, however many backward passes and updates it
        has; snapshots, signals and the time budget count by them.

        Args:
            count: Steps of the whole training.

        Raises:
            UsageError: There is a training loader.
            InterruptedTraining: A signal came; what was trained is saved.
        """
        if self._context.components.train_loader is not None:
            raise UsageError(
                "s.steps() is for a loop without a training loader: put the loop over the loader "
                "into `for epoch in s.epochs():`, and end both by `if s.steps_done >= ...: break`"
            )
        self._begin()
        return self._loop(self.engine.free_steps(count))

    def begin(self) -> None:
        """Restore the newest snapshot, if there is one, and start the clock. Collective.

        `epochs` and `steps` do it; call it before a loop of your own without a training loader,
        which goes on from `steps_done`. Steps are counted by updates there, and saved at its end.

        Raises:
            UsageError: There is a time budget: nothing could end the loop.
        """
        if self.config.loop.time_budget is not None:
            raise UsageError(
                "with a time budget nothing but the session can end the loop: use s.steps(count) "
                "or s.epochs(count) in the place of s.begin()"
            )
        self._begin()
        self.engine.begin_free()

    @property
    def steps_done(self) -> int:
        """Steps of the whole training until now, those before a resume too: batches or updates."""
        self._context.script.asks_for_steps = True
        return self._context.progress.state.step + self._context.has_updated

    @property
    def step_in_epoch(self) -> int:
        """Steps of this epoch until now: where a loop over the rest of its batches counts from."""
        return self._context.progress.state.step_in_epoch + self._context.has_updated

    def _begin(self) -> None:
        if self.engine.begun:
            raise UsageError(
                "the training has begun already: call s.epochs(), s.steps() or s.begin() once"
            )
        self._context.components.check_optimizers()
        plan = self._context.progress.plan
        if plan is not None:
            components = self._context.components
            sync = self.config.compute.sync_batchnorm or components.have_synced_batchnorm()
            optimizers = len(components.optimizers)
            check_plan(plan, sync_batchnorm=sync, optimizers=optimizers)
        self.engine.begin()

    def step(
        self,
        loss: Tensor,
        optimizer: Optimizer | None = None,
        *,
        weight: Tensor | float | None = None,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> bool:
        """Backward, combine over all workers, update, zero. Collective.

        The update has the gradient of the mean loss over the whole global batch, however its
        samples are spread. Where a batch is cut into pieces (`max_batch_per_worker`), only the last
        one updates.

        Args:
            loss: Scalar mean over this worker's samples of the batch.
            optimizer: The one to update with, where there are several; all by default.
            weight: Over how many things the loss is a mean, where it isn't over samples: tokens.
            outputs: (N, C) scores, and targets: (N,) class numbers, to count training accuracy.

        Returns:
            Whether the weights were updated.
        """
        complete = self.engine.backward(loss, outputs, targets, weight=weight)
        self.engine.update(optimizer)
        return complete

    def backward(
        self, loss: Tensor, *, more: bool = False, weight: Tensor | float | None = None
    ) -> bool:
        """Backward and combine over all workers, the first half of `step`. Collective.

        The script may change the gradients before it calls `update` (or the optimizer's own
        `step`): they have their true size, with fp16 as well.

        Args:
            loss: Scalar mean over this worker's samples of the batch.
            more: Another backward pass about the same batch follows before the update, whose
                gradients are added.
            weight: As for `step`; not with several backward passes about a batch.

        Returns:
            Whether the gradients are complete; not before the last piece of a batch.
        """
        if complete := self.engine.backward(loss, more=more, weight=weight):
            self.engine.leave_gradients()
        return complete

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Clip, update, and zero all gradients, the second half of `step`.

        Does nothing before the last piece of a batch.
        """
        self.engine.update(optimizer)

    def evaluate(self, judge: BatchMetrics, loader: EvalLoader | Loader) -> Metrics:
        """Average figures over all samples of a loader, each counted exactly once. Collective.

        Models are in evaluation mode, with all workers' running statistics, without gradients.

        Args:
            judge: Takes a batch; gives figures by name, each as its mean over the batch or with one
                element for each sample. `loss`, `accuracy` and `top5_accuracy` become the epoch's
                validation figures; the first counts for the best snapshot, early stopping and
                targets.
            loader: From `eval_loader`; or from `loader`, whose samples are then taken in the data
                set's own order.

        Raises:
            UsageError: The loader is none of the session's.
        """
        engine, loader = self.engine, self._eval_loader_of(loader)
        with engine.evaluation():
            batches, context = engine.validation.batches(loader), engine.context
            figures, samples = average(judge, batches, context.group, context.division)
        if loader.num_samples not in (0, samples):
            raise RuntimeError(f"evaluated {samples} of {loader.num_samples} samples")
        engine.validation.record(figures, samples, loader)
        return figures

    def _eval_loader_of(self, loader: object) -> EvalLoader:
        """Give what serves a loader's samples for an evaluation."""
        if isinstance(loader, Loader):
            if id(loader) not in self._eval_loaders:
                self._eval_loaders[id(loader)] = self._eval_loader(loader.served, None)
            return self._eval_loaders[id(loader)]
        if not isinstance(loader, EvalLoader):
            raise UsageError(
                f"s.evaluate takes a loader from s.eval_loader(data) or s.prepare(...), not a "
                f"{type(loader).__name__}"
            )
        return loader

    def log(self, **figures: float | Tensor) -> None:
        """Put figures of one's own into the epoch's row: metrics.csv, TensorBoard, the report.

        Called alike by every worker; rank 0's values are recorded.
        """
        self.engine.epoch.logged |= {name: float(value) for name, value in figures.items()}

    def snapshot(self, *, best: bool = False, must: bool = False) -> None:
        """Save everything needed to go on exactly, an open step ended. Collective; in background.

        Args:
            best: Also keep it as the best by validation.
            must: Where the one before is still being written, wait for it rather than skip this.
        """
        self.engine.snapshot(best=best, must=must)

    # Between the workers

    def print(self, *values: object) -> None:
        """Print once, on rank 0, above the progress."""
        if self.is_main:
            self._context.console.say(" ".join(map(str, values)))

    def barrier(self) -> None:
        """Wait for all workers. Collective."""
        self.engine.before_collective("s.barrier()")
        self._context.group.barrier()

    def gather(self, tensor: Tensor) -> Tensor:
        """Put the workers' rows of a batch into one tensor, in its order. Collective.

        Gradients pass through it: each worker computes a loss that compares samples over them all.

        Args:
            tensor: (N, ...), a row for each of this worker's samples, or as many for each.
        """
        return gathered(tensor, self._context)

    def sum(self, value: Tensor | float) -> Tensor:
        """Add a number or a tensor up over all workers. Collective.

        Returns:
            A new tensor, the same on every worker.
        """
        self.engine.before_collective("s.sum(...)")
        if isinstance(value, Tensor):
            return self._context.group.sum_(value.detach().clone())
        kind = torch.int64 if isinstance(value, int) else torch.float64
        return self._context.group.sum_(torch.tensor(value, dtype=kind))

    def _register(self, component: object) -> object:
        number = len(self._context.components.models)
        match component:
            case nn.Module():
                return self.model(component, name=f"model{number + 1}" if number else "model")
            case Optimizer():
                return self.optimizer(component)
            case LRScheduler():
                return self.scheduler(component)
            case DataLoader():
                served = describe_data(component, self.config.loop.seed)
                return (self.loader if self._trains(served) else self.eval_loader)(served)
            case None:
                return None
        taken = "models, optimizers, schedulers and DataLoaders (torch's; others: s.keep)"
        raise UsageError(f"s.prepare takes {taken}, not a {type(component).__name__}")

    def _trains(self, served: DataSource) -> bool:
        """Tell whether a DataLoader is one to train on: the first that shuffles, or is a stream.

        Further ones may be either, and work as both, but with shards, which allow one alone.
        """
        may_be = self._context.components.train_loader is None or self.config.data.shards is None
        return may_be and (served.shuffle or served.is_stream)

    def _opener(
        self,
        served: DataSource,
        augment: tuple[Augment, ...] = (),
        evaluate_with: tuple[Augment, ...] = (),
    ) -> Open:
        def open_source() -> BatchSource:
            context = self._context
            layout = context.components.channels_last
            return make_source(
                served, context.config, context.group, layout, augment, evaluate_with
            )

        return open_source

    def _settle(self, name: str, value: Value) -> Value:
        compare_given(self.config, self._given, name, value)
        return value

    def _before_begin(self, call: str) -> None:
        if self.engine.begun:
            more = LATE_LOADER if call == "s.loader" else ""
            raise UsageError(f"{call}(...) comes too late: the training has begun. {EARLY}{more}")

"""A model's forward and backward pass as two CUDA graphs, for batches whose shape repeats.

What is captured is what autograd does between the model's inputs, its parameters and its outputs.
The loss, the exchange of gradients and the update stay as they are, so that hooks on parameters
(DistributedDataParallel's, say) see what they do without graphs.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from paceline.distributed.device import default_generator, features, free_bytes
from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.gradient_sync.replica import Forward
from paceline.options.figures import show_bytes
from paceline.options.text import in_brief
from paceline.training.options import ComputeOptions

_REPEATS = 3
"""A shape is captured when it comes for this time, if nothing is captured yet; a graph that hasn't
been used for so many passes makes room for another shape."""
_MAX_SHAPES = 64
"""So many are counted before that begins anew: texts, say, are of any length."""
_WARM_UP = 3
"""Passes before one is captured: libraries set themselves up in the first."""
_ASIDE = "thread_local"
"""Only this thread's calls are captured or refused: NCCL's threads and those that read go on."""
_SPARE = 0.1
"""Share of the free memory that `auto` leaves: blocks don't fit into each other without gaps."""
_PLAIN = frozenset((int, float, bool, str, type(None)))


class CaptureError(Exception):
    """A model's passes can't be captured; says why."""


@final
class GraphSwitch:
    """Switches CUDA graphs on or off for a training, and records why a model isn't captured."""

    def __init__(self, option: str, why_not: str | None) -> None:
        """Args:
        option: on or auto.
        why_not: What rules graphs out, where something does.

        Raises:
            UsageError: They are asked for, and can't be.
        """
        self.is_on = option == "on"
        self.is_must = option == "on"
        self.label = "on" if self.is_on else "auto: measuring the first steps"
        """What was chosen, in one line."""
        self.problem: str | None = None
        """Why there are none, where there can't be."""
        self.captures = 0
        """How many times passes have been captured."""
        if why_not is not None:
            self.give_up(why_not)

    def give_up(self, why: str) -> None:
        """Settle that there are no graphs.

        Raises:
            UsageError: They are asked for.
        """
        if self.is_must:
            raise UsageError(f"--cuda-graphs on: {why}. Give --cuda-graphs off, or auto")
        self.is_on, self.problem, self.label = False, why, f"auto: off, since {why}"


def why_no_graphs(options: ComputeOptions, shards: int | None, group: Group) -> str | None:
    """Say what rules graphs out before there is a model; None where nothing does. Pure."""
    if not features(group.device).has_graphs:
        return f"only GPUs of NVIDIA have CUDA graphs, and this is {group.device.type}"
    if shards is not None:
        return "with --shards each shard has buffers of its own, and a graph has one set"
    if options.compile:
        return "with --compile kernels are launched by what is compiled"
    if options.sync_batchnorm and group.world_size > 1:
        return "--sync-batchnorm sends something within the forward pass"
    return None


def graph_switch_of(
    options: ComputeOptions, shards: int | None, group: Group
) -> GraphSwitch | None:
    """Make what says whether passes are graphs; None with `off`, and with `auto` but on CUDA.

    Raises:
        UsageError: They are asked for, and can't be.
    """
    asked = options.cuda_graphs
    if asked == "off" or (asked == "auto" and not features(group.device).has_graphs):
        return None
    return GraphSwitch(asked, why_no_graphs(options, shards, group))


def graphed(
    module: nn.Module, forward: Forward | None, switch: GraphSwitch | None, group: Group
) -> Forward | None:
    """Give a forward pass that is replayed where it can be; as it was where none can.

    Args:
        forward: What a forward pass computes; None: the module's own.
        switch: Says whether there are graphs; None: nobody asks for any.

    Raises:
        UsageError: Graphs are asked for, and this module can't have any.
    """
    if switch is None:
        return forward
    is_synced = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    if is_synced and group.world_size > 1 and switch.problem is None:
        switch.give_up("SyncBatchNorm sends something within the forward pass")
    if switch.problem is not None:
        return forward
    return GraphedForward(module, forward or module.forward, switch)


@final
@dataclass(kw_only=True)
class _Pass:
    """Inputs and settings of a forward pass: a graph fits that was captured with equal ones."""

    leaves: list[object]
    """Flattened arguments."""
    spec: TreeSpec
    key: object

    @property
    def tensors(self) -> list[Tensor]:
        """Those among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """Give its arguments with others in the place of the tensors."""
        given = iter(inputs)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


@final
class GraphedForward:
    """A forward pass that is a graph's replay where its shape has been captured."""

    def __init__(self, module: nn.Module, compute: Forward, switch: GraphSwitch) -> None:
        """Args:
        module: On its device.
        compute: What a forward pass computes: the module's own, perhaps under autocast.
        switch: Says whether there are graphs.
        """
        self._module, self._compute, self._switch = module, compute, switch
        self._layers = list(module.modules())
        self._parameters = list(module.parameters())
        self._seen: Counter[object] = Counter()
        self._unused = 0
        """Passes since the graph was last of use."""
        self._graph: _Graph | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Compute a forward pass."""
        if not self._switch.is_on:
            self._graph = None  # its memory, where auto has measured it
            return self._compute(*args, **kwargs)
        current = self._look_at(args, kwargs) if torch.is_grad_enabled() else None
        if current is not None and (graph := self._graph_for(current)) is not None:
            return graph.run(current.tensors)
        try:
            return self._compute(*args, **kwargs)
        except torch.OutOfMemoryError:
            if torch.is_grad_enabled() or self._graph is None or self._switch.is_must:
                raise
        self._switch.give_up("an evaluation needs their memory")
        return self(*args, **kwargs)

    def _look_at(self, args: object, kwargs: object) -> _Pass | None:
        """Say what a graph of this pass depends on; None where there can't be one. Local."""
        # Weights that the script's own autocast has in its cache would be another pass's.
        if torch.is_autocast_enabled("cuda"):
            return None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if not all(map(_can_be_copied, tensors)) or not all(type(o) in _PLAIN for o in others):
            return None
        key = (
            tuple((t.shape, t.stride(), t.dtype) for t in tensors),
            tuple((type(other), other) for other in others),
            str(spec),
            tuple(map(_settings_of, self._layers)),
            tuple((p.data_ptr(), p.requires_grad) for p in self._parameters),
            tuple(b.data_ptr() for x in self._layers for b in x._buffers.values() if b is not None),
        )
        return _Pass(leaves=leaves, spec=spec, key=key)

    def _graph_for(self, current: _Pass) -> "_Graph | None":
        graph = self._graph
        if graph is not None and graph.key == current.key:
            self._unused = 0
            # Of two forward passes before a backward pass the second would overwrite the first.
            return None if graph.awaits_backward else graph
        self._unused += 1
        if len(self._seen) == _MAX_SHAPES:
            self._seen.clear()
        self._seen[current.key] += 1
        if self._seen[current.key] < _REPEATS or (graph is not None and self._unused < _REPEATS):
            return None
        if graph is not None and graph.awaits_backward:
            return None
        self._graph = None
        self._seen.clear()
        try:
            self._graph = _capture(self._module, self._compute, current, self._switch)
        except CaptureError as error:
            self._switch.give_up(str(error))
            return None
        except RuntimeError as error:
            # What fails a capture comes first; that it can't be ended then says nothing of it.
            self._switch.give_up(in_brief(error.__context__ or error))
            return None
        self._switch.captures += 1
        self._unused = 0
        return self._graph


def _can_be_copied(tensor: Tensor) -> bool:
    """Tell whether a graph can have an input of its own for this one."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return plain and tensor.is_cuda and not tensor.requires_grad


@final
class _Use:
    """A replay of the forward graph; lives as long as something may run its backward pass."""

    def __init__(self) -> None:
        self.is_over = False


@final
@dataclass(kw_only=True)
class _Graph:
    """A captured pair of passes, with the memory that they read and write."""

    key: object
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor | None]
    spec: TreeSpec
    """Structure of the outputs."""
    output_gradients: list[Tensor | None]
    """Gradient of each output; None where it has none."""
    parameters: list[nn.Parameter]
    """Those that the outputs depend on."""
    gradients: list[Tensor | None]
    """Gradient of each parameter; None where it gets none."""
    last_use: ReferenceType[_Use] | None = None
    held: list[tuple[nn.Parameter, int]] = field(init=False)
    """Parameters and addresses of gradients that lie in the graph's memory."""

    def __post_init__(self) -> None:
        pairs = zip(self.parameters, self.gradients, strict=True)
        self.held = [(p, gradient.data_ptr()) for p, gradient in pairs if gradient is not None]

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward pass of the last replay may still come."""
        use = None if self.last_use is None else self.last_use()
        return use is not None and not use.is_over

    def run(self, tensors: Sequence[Tensor]) -> object:
        """Replay the forward pass."""
        self.keep_gradients()
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given)
        made = iter(_Replay.apply(self, *self.parameters))
        leaves = [None if output is None else next(made) for output in self.outputs]
        return tree_unflatten(leaves, self.spec)

    def keep_gradients(self) -> None:
        """Give gradients that others will be added to memory of their own.

        Autograd takes a first gradient as it is, and replays write where it lies: those of the
        forward pass too, since what it needs for a while has the same memory.
        """
        for parameter, pointer in self.held:
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() == pointer:
                parameter.grad = gradient.clone()


@final
class _Replay(torch.autograd.Function):
    """Replays a graph's forward pass, and later its backward pass."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward graph; its inputs are in their place already."""
        graph.forward.replay()
        ctx.graph, ctx.use = graph, _Use()
        graph.last_use = ref(ctx.use)
        # Copies: the script may look at outputs after the next step, which overwrites these.
        pairs = zip(graph.outputs, graph.output_gradients, strict=True)
        made = [(o.clone(), gradient is not None) for o, gradient in pairs if o is not None]
        ctx.mark_non_differentiable(*(output for output, has in made if not has))
        return tuple(output for output, _ in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Replay the backward graph; gives the parameters' gradients, none for the graph."""
        graph: _Graph = ctx.graph
        use: _Use = ctx.use
        if graph.last_use is None or graph.last_use() is not use:
            raise JobError(
                "a second backward pass through a model's output, after the model has been called "
                "again: with --cuda-graphs its memory has been overwritten. Give --cuda-graphs off"
            )
        graph.keep_gradients()
        # The graph reads the outputs' gradients from memory of its own.
        pairs = zip(graph.outputs, graph.output_gradients, strict=True)
        owns = [own for output, own in pairs if output is not None]
        for own, gradient in zip(owns, gradients, strict=True):
            if own is not None:
                own.copy_(gradient)
        graph.backward.replay()
        use.is_over = True
        return (None, *(None if g is None else g.detach() for g in graph.gradients))


def _capture(module: nn.Module, compute: Forward, current: _Pass, switch: GraphSwitch) -> _Graph:
    """Capture a forward pass and its backward pass. Changes nothing that is trained.

    Raises:
        CaptureError: The model does what a replay wouldn't, or with auto the memory won't do.
        RuntimeError: CUDA can't capture what it does.
    """
    _refuse_hooks(module)
    known = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    inputs = [tensor.clone() for tensor in current.tensors]
    if any(
        own.stride() != given.stride() for own, given in zip(inputs, current.tensors, strict=True)
    ):
        raise CaptureError("an argument's elements share memory")
    args, kwargs = current.arguments(inputs)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with _as_it_was(module, inputs), _instead(module, known):
        # Warm up on the stream of the capture, and learn what the outputs depend on.
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_reserved()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                outputs, spec = _flat_outputs(compute(*args, **kwargs))
                reached = _reached(known, outputs)
                _gradients(outputs, reached, [_zeros(output) for output in outputs])
        torch.accelerator.synchronize()
        if not switch.is_must:
            _refuse_memory(torch.accelerator.memory_reserved() - before)
        with _captured_into(forward, pool, stream):
            outputs, spec = _flat_outputs(compute(*args, **kwargs))
        output_gradients = [_zeros(output) for output in outputs]
        with _captured_into(backward, pool, stream):
            gradients = _gradients(outputs, reached, output_gradients)
    return _Graph(
        key=current.key,
        forward=forward,
        backward=backward,
        inputs=inputs,
        outputs=[None if output is None else output.detach() for output in outputs],
        spec=spec,
        output_gradients=output_gradients,
        parameters=[p for p in module.parameters() if id(known[id(p)]) in set(map(id, reached))],
        gradients=gradients,
    )


@contextmanager
def _captured_into(
    graph: torch.cuda.CUDAGraph, pool: torch.cuda._POOL_HANDLE, stream: torch.cuda.Stream
) -> Iterator[None]:
    """Capture what a block does; where that fails, torch is as it was before."""
    generator = _generator()
    untouched = generator.clone_state()
    try:
        with torch.cuda.graph(graph, pool, stream, _ASIDE):
            yield
    except BaseException:
        # For torch 2.11 such a capture is never over: it draws no random number any more
        # (pytorch/pytorch#171263), and gives no memory back that two streams have used (#180395).
        generator.graphsafe_set_state(untouched)
        with suppress(RuntimeError):  # what later versions say: it is over
            torch._C._cuda_endAllocateToPool(generator.device.index, pool)
        raise


def _generator() -> torch.Generator:
    """Give that of this thread's GPU."""
    return default_generator(torch.device("cuda", torch.accelerator.current_device_index()))


def _refuse_memory(needed: int) -> None:
    """Refuse what takes so many bytes besides a step's: other passes still need as many."""
    free = int((1 - _SPARE) * free_bytes(_generator().device)) - needed
    if needed > free:
        left = show_bytes(max(free, 0))
        raise CaptureError(f"their memory doesn't fit: {show_bytes(needed)} needed, {left} free")


def _flat_outputs(outputs: object) -> tuple[list[Tensor | None], TreeSpec]:
    leaves, spec = tree_flatten(outputs)
    unsupported = [leaf for leaf in leaves if not isinstance(leaf, Tensor | None)]
    if unsupported:
        raise CaptureError(f"the model's output has a {type(unsupported[0]).__name__} in it")
    if any(leaf is not None and not leaf.is_cuda for leaf in leaves):
        raise CaptureError("the model's output has a tensor on the CPU in it")
    return leaves, spec


@contextmanager
def _instead(module: nn.Module, known: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Put other parameters into the module, which have the same memory.

    What accumulates the real ones' gradients is DistributedDataParallel's, and belongs to another
    stream than a capture's.
    """
    own = [(layer._parameters, dict(layer._parameters)) for layer in module.modules()]
    try:
        for now, before in own:
            now.update({n: p if p is None else known[id(p)] for n, p in before.items()})
        yield
    finally:
        for now, before in own:
            now.update(before)


def _reached(
    known: Mapping[int, nn.Parameter], outputs: Sequence[Tensor | None]
) -> list[nn.Parameter]:
    """Give those of these parameters that the outputs depend on."""
    own = set(map(id, known.values()))
    nodes = [output.grad_fn for output in outputs if output is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)  # an AccumulateGrad's
        if leaf is not None:
            if id(leaf) not in own:
                raise CaptureError("the model computes with a parameter that isn't its own")
            found.append(id(leaf))
        following = {after for after, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    if not found:
        raise CaptureError("the model's output has no gradient")
    return [parameter for parameter in known.values() if id(parameter) in found]


def _zeros(output: Tensor | None) -> Tensor | None:
    if output is None or not output.requires_grad:
        return None
    return torch.zeros_like(output)


def _gradients(
    outputs: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    output_gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    made = [output for output in outputs if output is not None and output.requires_grad]
    given = [gradient for gradient in output_gradients if gradient is not None]
    return list(torch.autograd.grad(made, parameters, given, allow_unused=True))


def _refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks that run within the passes: a replay wouldn't call them.

    Those of the model itself run around its forward pass, and those on a parameter's gradient
    behind its backward pass.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, layer in module.named_modules():
        if layer is not module and any(getattr(layer, kind) for kind in names):
            raise CaptureError(f"{name} has hooks, which a replay wouldn't call")
    if any(getattr(torch_modules, f"_global{kind}", None) for kind in names):
        raise CaptureError("all modules have hooks, which a replay wouldn't call")


@contextmanager
def _as_it_was(module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Undo what passes change of a model and of random numbers, and refuse what a replay wouldn't.

    Raises:
        CaptureError: The passes change more than buffers in place and the GPU's random numbers.
    """
    # What can be put back: attributes, buffers, random numbers; what can be compared: plain values.
    layers = list(module.modules())
    attributes = [(layer, dict(vars(layer)), dict(layer._buffers)) for layer in layers]
    before = [_plain_state(layer) for layer in layers]
    versions = [tensor._version for tensor in inputs]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    drawn, on_host = _generator().get_state(), _HostRandom()
    try:
        yield
        after = [_plain_state(layer) for layer in layers]
        problem = _difference(module, before, after) or on_host.difference()
    finally:
        torch.accelerator.synchronize()
        _generator().set_state(drawn)
        on_host.restore()
        for layer, own, buffers in attributes:
            vars(layer).clear()
            vars(layer).update(own)
            layer._buffers.clear()
            layer._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
    if problem is None and versions != [tensor._version for tensor in inputs]:
        problem = "the model changes its input"
    if problem is not None:
        raise CaptureError(f"{problem}, which a replay wouldn't do")


def _plain_state(layer: nn.Module) -> dict[str, object]:
    """Say what a layer has of values that aren't tensors, and which tensors and modules."""
    own = {name: _look(value) for name, value in vars(layer).items()}
    return own | {f"{name} ": id(buffer) for name, buffer in layer._buffers.items()}


def _settings_of(layer: nn.Module) -> tuple[object, ...]:
    """Give a layer's plain attributes, `training` and those that a script changes between steps."""
    return tuple([value for value in vars(layer).values() if type(value) in _PLAIN])


def _look(value: object) -> object:
    if type(value) in _PLAIN:
        return value
    return (id(value), len(value)) if isinstance(value, list | dict | set) else id(value)


def _difference(
    module: nn.Module, before: Sequence[dict[str, object]], after: Sequence[dict[str, object]]
) -> str | None:
    for (name, layer), old, new in zip(module.named_modules(), before, after, strict=True):
        changed = sorted(
            key.strip() for key in old.keys() | new.keys() if old.get(key) != new.get(key)
        )
        if changed:
            where = f"{name}.{changed[0]}" if name else changed[0]
            return f"the forward pass of {type(layer).__name__} sets {where}"
    return None


@final
class _HostRandom:
    """The host's random numbers: what a pass draws of them, replays would have drawn once."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def difference(self) -> str | None:
        """Say whether any has been drawn."""
        now = _HostRandom()
        same = torch.equal(self._torch, now._torch) and self._python == now._python
        if same and str(self._numpy) == str(now._numpy):
            return None
        return "the model draws random numbers on the host"

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

"""The process group of a training: joining, leaving, and the small collectives it needs."""

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.address import Address
from paceline.distributed.backends import (
    control_device,
    has_few_operations,
    load_backend,
    name_for_torch,
)
from paceline.distributed.device import is_accelerator
from paceline.distributed.environment import chosen_interface, read_environment, use_interface
from paceline.distributed.interface import Route, find_route, loopback_route
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Placement
from paceline.distributed.rendezvous import arrive, leave, of_attempt, of_session, open_store
from paceline.distributed.rendezvous_address import meeting_address
from paceline.distributed.startup_facts import Facts, WorkerFacts, compare_by_store, disagreement
from paceline.errors import InterruptedTraining, JobError, UsageError

_REMEMBERED = 16
"""Tensors of the last collectives that are kept; of those above a size the last one alone."""
_LARGE_BYTES = 1 << 16


class CollectiveListener(Protocol):
    """Called with every collective before it may block, and when it is over."""

    def enter(self, collective: str) -> None:
        """A collective of this name begins."""

    def leave(self) -> None:
        """It is over."""


class SmallRows(Protocol):
    """A quicker way for rows of a few bytes."""

    def takes(self, row: Tensor) -> bool:
        """Tell whether it can go this way; the same on every worker."""

    def gather(self, row: Tensor) -> Tensor:
        """Do as `Group.gather_rows`."""

    def meet(self, collective: str, size: int) -> None:
        """Make sure that all workers are in the same collective of the backend. Blocks."""


@final
class Group:
    """All workers of a training. With one worker every collective is the identity.

    Every method is collective: all workers call it in the same order, and it blocks.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        backend: str,
        address: Address | None = None,
        route: Route | None = None,
    ) -> None:
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.placement = placement
        self.device = device
        self.backend = backend
        self.address = address
        self.route = route
        self.has_few_operations = has_few_operations(backend)
        """Whether the backend offers only all_reduce, broadcast, reduce, all_gather, barrier."""
        self.listener: CollectiveListener | None = None
        """Called with this worker's collectives."""
        self.small_rows: SmallRows | None = None
        """Instead of the backend's way; set and taken away by all workers alike."""
        self._control = control_device(backend, device)
        # A thread of the backend may let go of a tensor after the call is over. Would it be the
        # last to do so, it needed the interpreter, which may be ending: that aborts the process.
        self._recent: deque[Tensor] = deque(maxlen=_REMEMBERED)
        self._large: Tensor | None = None

    def gather_rows(self, row: Tensor) -> Tensor:
        """Collect one small row from each worker.

        Args:
            row: (K,), the same K and dtype on every worker; on the CPU, or where the backend takes
                tensors.

        Returns:
            (world_size, K), in rank order, where the row is, the same on every worker.
        """
        if self.world_size == 1:
            return row.unsqueeze(0)
        if self.small_rows is not None and self.small_rows.takes(row):
            with self._listened_to("all-gather", None):
                return self.small_rows.gather(row.contiguous().flatten())
        # These backends have only the all-gather of lists, on their own device.
        if self.has_few_operations:
            own = row.to(self._control).contiguous()
            listed = [torch.empty_like(own) for _ in range(self.world_size)]
            self._recent.extend((own, *listed))
            with self._listened_to("all-gather", own):
                dist.all_gather(listed, own)
            return torch.stack(listed).to(row.device)
        # Gloo takes less than it expects without a word, where a worker is in another collective:
        # what it leaves out is then zero, and not whatever stood there.
        own, rows = row.contiguous(), row.new_zeros(self.world_size * row.numel())
        self._recent.extend((own, rows))
        with self._listened_to("all-gather", own):
            dist.all_gather_into_tensor(rows, own)
        return rows.view(self.world_size, row.numel())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all workers, in place."""
        if self.world_size > 1:
            sent = self._carried(tensor)
            with self._listened_to("all-reduce", sent):
                dist.all_reduce(sent)
            _take_back(tensor, sent)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replace a tensor by that of one rank, in place."""
        if self.world_size > 1:
            # Backends send memory as it lies, gaps included. Of what expand() repeats (stride 0)
            # there is one element.
            held = tensor
            if not tensor.is_contiguous():
                held = tensor[tuple(slice(1 if step == 0 else None) for step in tensor.stride())]
            sent = self._carried(held.contiguous())
            with self._listened_to("broadcast", sent):
                dist.broadcast(sent, src=source)
            _take_back(held, sent)
        return tensor

    def broadcast_text(self, text: str) -> str:
        """Give every worker rank 0's text (no pickling: length first, then UTF-8 bytes)."""
        if self.world_size == 1:
            return text
        content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        length = self.broadcast_(torch.tensor([content.numel() if text else 0]))
        received = content if self.rank == 0 else content.new_empty(max(1, int(length)))
        self.broadcast_(received)
        return bytes(received.numpy()).decode() if int(length) else ""

    def gather_texts(self, text: str) -> list[str]:
        """Give every worker the texts of all, in rank order."""
        content = text.encode()
        lengths = self.gather_rows(torch.tensor([len(content)]))[:, 0].tolist()
        padded = bytearray(content.ljust(max(1, *lengths), b"\0"))
        rows = self.gather_rows(torch.frombuffer(padded, dtype=torch.uint8))
        return [bytes(row[:n].numpy()).decode() for row, n in zip(rows, lengths, strict=True)]

    def hosts(self) -> list[str]:
        """Name the workers' hosts, in rank order."""
        return self.gather_texts(socket.gethostname())

    def barrier(self) -> None:
        """Wait for all workers."""
        self.gather_rows(torch.zeros(1))

    @contextmanager
    def _listened_to(self, collective: str, of_backend: Tensor | None) -> Iterator[None]:
        if self.listener is not None:
            self.listener.enter(collective)
        if self.small_rows is not None and of_backend is not None:
            self.small_rows.meet(collective, of_backend.nbytes)
        yield
        if self.listener is not None:
            self.listener.leave()

    def _carried(self, tensor: Tensor) -> Tensor:
        """Bring a tensor to where a backend that stands alone can carry it."""
        carried = tensor.to(self._control) if self.has_few_operations and tensor.is_cpu else tensor
        if carried.nbytes > _LARGE_BYTES:
            self._large = carried
        else:
            self._recent.append(carried)
        return carried


def group_timeout() -> timedelta:
    """Say how long the workers' process group, which has Gloo on CPUs, waits for one of them."""
    world = dist.group.WORLD
    assert world is not None
    timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return timeout


def _take_back(tensor: Tensor, sent: Tensor) -> None:
    if sent is not tensor:
        tensor.copy_(sent)


@contextmanager
def joined(
    placement: Placement,
    device: torch.device,
    backend: str,
    timeout_s: float,
    options: DistOptions | None = None,
    facts: Facts | None = None,
) -> Iterator[Group]:
    """Join the process group for the length of a training. Collective.

    Waits for all workers in a store, compares what they train, chooses the network interface, and
    connects.

    Args:
        placement: This worker's place.
        device: This worker's device.
        backend: `nccl`, `gloo` …; small control messages go through gloo on the CPU but for those
            that stand alone.
        timeout_s: Seconds after which waiting for the others is an error.
        options: Of which `init_method` and `interface` count.
        facts: What has to be the same on all workers; nothing is compared without.

    Raises:
        UsageError: The backend can't be used here, or two workers have the same rank.
        JobError: The workers' facts differ.
        InfrastructureError: Not all workers came.
    """
    if placement.world_size == 1:
        yield Group(placement, device, backend)
        return
    load_backend(backend, device)
    if backend == "mpi":
        joining = _joined_by_mpi(placement, device, facts)
    else:
        options = options or DistOptions()
        joining = _joined_by_store(placement, device, backend, timeout_s, options, facts)
    with joining as group:
        yield group


def choose_route(placement: Placement, address: Address, interface: str | None) -> Route:
    """Choose this worker's network interface: loopback where all workers are on one node."""
    chosen = chosen_interface(read_environment())
    if placement.on_one_node and not interface and not chosen:
        return loopback_route()
    return find_route(address.host, interface, chosen)


@contextmanager
def _joined_by_store(
    placement: Placement,
    device: torch.device,
    backend: str,
    timeout_s: float,
    options: DistOptions,
    facts: Facts | None,
) -> Iterator[Group]:
    """Join through the store; arguments and errors are those of `joined`. Collective."""
    address = meeting_address(placement, options, read_environment())
    # An attempt has keys of its own in rank 0's store: a restart reads nothing of the one before.
    store = open_store(address, placement.rank, placement.world_size, timeout_s, options.interface)
    own = of_session(of_attempt(store, placement.attempt), address, placement.rank)
    placement = arrive(own, address, placement, timeout_s)
    # Workers that are set up differently fail here, with the reason, instead of hanging in a
    # collective.
    if facts is not None:
        try:
            compare_by_store(own, placement.rank, placement.world_size, facts, timeout_s)
        except JobError:
            # The next start may meet at the same place.
            leave(own, address, placement.rank, placement.world_size)
            raise
    # The backend reads its interface from the environment when the process group is made.
    route = choose_route(placement, address, options.interface)
    use_interface(route.interface, override=options.interface is not None)
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group already. One of the script's own: leave out its "
            "init_process_group, since the session makes it. One of a session that ended with an "
            "error, which on GPUs can't be left: start a new process"
        )
    dist.init_process_group(
        backend=name_for_torch(backend),
        store=own,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and backend != "smddp" else None,
    )
    ends_well = meets_again = False
    try:
        yield Group(placement, device, backend, address, route)
        ends_well = meets_again = True
    except InterruptedTraining:
        ends_well = True  # of all workers alike
        raise
    except SystemExit as left:
        ends_well = not left.code
        raise
    finally:
        # After an error NCCL would wait here for collectives that the others never enter, until
        # their watchdog ends them. The process ends instead, and they learn of it at once.
        if dist.is_initialized() and (ends_well or not is_accelerator(device)):
            dist.destroy_process_group()
        leave(own, address, placement.rank, placement.world_size, meets_again=meets_again)


@contextmanager
def _joined_by_mpi(
    placement: Placement, device: torch.device, facts: Facts | None
) -> Iterator[Group]:
    """MPI numbers its workers itself and needs neither a store nor an interface of ours."""
    dist.init_process_group("mpi")
    expected = (placement.rank, placement.world_size)
    if (dist.get_rank(), dist.get_world_size()) != expected:
        raise JobError(
            f"MPI says rank {dist.get_rank()} of {dist.get_world_size()}, the environment says "
            f"rank {placement.rank} of {placement.world_size}. With --backend mpi start the "
            "workers by mpirun alone"
        )
    group = Group(placement, device, "mpi")
    try:
        if facts is not None:
            _compare(group, facts)
        yield group
    finally:
        dist.destroy_process_group()


def _compare(group: Group, facts: Facts) -> None:
    """Compare facts by the group itself, where there is no store. Collective."""
    workers = map(WorkerFacts.from_json, group.gather_texts(WorkerFacts.here(facts).to_json()))
    problem = disagreement(list(workers))
    if problem:
        raise JobError(problem)

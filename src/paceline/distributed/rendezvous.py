"""Rendezvous: opens the store through which workers connect, and waits until all have arrived.

Phases: open the store (rank 0 keeps it, on one address), note one's arrival, wait for the others,
learn who is on which node.
"""

import ctypes
import errno
import importlib
import itertools
import json
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from paceline.distributed.address import Address
from paceline.distributed.environment import read_environment, store_file
from paceline.distributed.interface import address_on, own_addresses, reachable_address
from paceline.distributed.placement import Placement
from paceline.errors import InfrastructureError, UsageError

_BACKLOG = 1024
_LAST_WAIT_S, _POLL_S = 20.0, 0.05
_GRACE_S = 2.0
"""For torch to say itself that nobody answered in time."""
_NOT_OURS = (errno.EADDRNOTAVAIL,)


@cache
def open_store(
    address: Address, rank: int, world_size: int, timeout_s: float, interface: str | None
) -> Store:
    """Open the store of this training; a process opens it once, until `leave`.

    Args:
        rank: Rank 0 keeps a tcp store.
        timeout_s: How long to wait for rank 0.
        interface: `--interface`: where rank 0 listens instead of at the address's own host.

    Raises:
        UsageError: The address is no place for a store.
        InfrastructureError: Rank 0 can't be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    if address.path:
        return _file_store(address, timeout)
    # Rank 0 opens the port itself, at the chosen interface, and hands it to torch.
    keeps = address.scheme == "tcp" and rank == 0
    host = address.host
    if address.scheme == "tcp":
        host = address_on(interface) if keeps and interface else reachable_address(host)
    listener = _listener(host, address) if keeps else None
    connect = partial(
        TCPStore,
        host,
        address.port,
        world_size=world_size,
        is_master=keeps,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    try:
        return _within(connect, timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise InfrastructureError(
            f"rank {rank} on {socket.gethostname()} did not reach rank 0 at {address} within "
            f"{timeout_s:g} s. Is rank 0 started there? Does a firewall close the port? "
            "`paceline doctor --here` shows what this worker finds"
        ) from error


def _within(connect: Callable[[], TCPStore], timeout_s: float) -> TCPStore:
    """Connect in a thread: torch waits without end for one that accepts and says nothing.

    Raises:
        TimeoutError: It took longer than torch was told to wait.
    """
    outcome: queue.SimpleQueue[TCPStore | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        """Connect, and hand over the store or the error."""
        try:
            outcome.put(connect())
        except RuntimeError as error:
            outcome.put(error)

    # A daemon: if torch never returns, the process can still end.
    threading.Thread(target=run, name="paceline-store", daemon=True).start()
    try:
        result = outcome.get(timeout=timeout_s + _GRACE_S)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, RuntimeError):
        raise result
    return result


def leave(
    store: Store, address: Address, rank: int, world_size: int, *, meets_again: bool = False
) -> None:
    """Close the store; the last worker that leaves removes a file (torch's own count misses some).

    Args:
        meets_again: Whether this process may open a store there once more, for a next session,
            as the others may. Then it waits for them, within a limit.
    """
    if meets_again and address.scheme == "tcp":
        _wait_until_closed(store, address, rank, world_size)
    # The last one out: nobody will read the file any more.
    if address.scheme == "file" and store.add("left", 1) >= world_size:
        Path(address.path).unlink(missing_ok=True)
    open_store.cache_clear()


def _wait_until_closed(store: Store, address: Address, rank: int, world_size: int) -> None:
    """Wait for the end of rank 0's store: who comes to the next one early must not find this one.

    The store itself would tell of its end by a stack of C++ on the terminal. A connection beside
    it, made while it certainly is there, tells by its end of file.
    """
    if rank == 0:
        _wait_for_count(store, "leaving", world_size - 1)
        return
    with suppress(OSError, RuntimeError):  # rank 0 has gone already, or takes too long
        end = (reachable_address(address.host), address.port)
        with socket.create_connection(end, timeout=_LAST_WAIT_S) as connection:
            store.add("leaving", 1)
            connection.recv(1)


def common_text(store: Store, rank: int, key: str, text: str) -> str:
    """Give every worker rank 0's text. Every worker calls it; the others wait for rank 0."""
    if rank == 0:
        store.set(key, text)
    value = store.get(key).decode()
    store.add(f"{key}/readers", 1)
    return value


def wait_until_read(store: Store, key: str, world_size: int) -> None:
    """Keep the store on rank 0 until all workers have read its text, or the time is up."""
    _wait_for_count(store, f"{key}/readers", world_size)


def _wait_for_count(store: Store, key: str, count: int) -> None:
    deadline_s = time.monotonic() + _LAST_WAIT_S
    while store.add(key, 0) < count and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def arrive(store: Store, address: Address, placement: Placement, timeout_s: float) -> Placement:
    """Wait until every worker is there, and settle who is on which node. Every worker calls it.

    Args:
        address: Where the store is, for messages.
        timeout_s: How long to wait for the others.

    Returns:
        The placement with figures of nodes.

    Raises:
        UsageError: A worker of this rank is there already, or was in an earlier training.
        InfrastructureError: Workers are missing; the message names them.
    """
    # 1. Claim the rank: whoever comes second with the same one ends the start for all.
    rank, world_size = placement.rank, placement.world_size
    if store.add(f"arrived/{rank}", 1) > 1 and address.scheme != "agent":
        message = _address_in_use(address, rank)
        store.set("all", message)
        raise UsageError(message)
    # 2. Say where it is, then count up: a worker that is counted has said it.
    store.set(f"node/{rank}", json.dumps([this_node(), placement.local_rank]))
    if store.add("arrived", 1) >= world_size:
        store.set("all", "here")
    # 3. Wait for the last one, which sets "all".
    _wait_for_all(store, address, placement, timeout_s)
    # 4. Where the launcher didn't say who shares a node, all workers work it out from the same
    # list.
    if placement.settled:
        return placement
    nodes = [json.loads(store.get(f"node/{other}")) for other in range(world_size)]
    return settled(placement, [str(node) for node, _ in nodes], [int(own) for _, own in nodes])


def settled(placement: Placement, nodes: Sequence[str], local_ranks: Sequence[int]) -> Placement:
    """Count nodes and their workers.

    Args:
        nodes: Every worker's node, in rank order.
        local_ranks: As the workers were told. Where two of a node have the same one, they are
            numbered in rank order instead.
    """
    own = nodes[placement.rank]
    here = [rank for rank, node in enumerate(nodes) if node == own]
    # Local ranks as given count only if they are 0 ... n-1 on this node, each once.
    distinct = len({local_ranks[rank] for rank in here}) == len(here)
    given = distinct and max(local_ranks[rank] for rank in here) < len(here)
    order = list(dict.fromkeys(nodes))
    return replace(
        placement,
        local_rank=local_ranks[placement.rank] if given else here.index(placement.rank),
        local_world_size=Counter(nodes)[own],
        node_rank=order.index(own),
        nodes=len(order),
        settled=True,
    )


def of_attempt(store: Store, attempt: int) -> Store:
    """Give an attempt keys of its own: restarted workers must not find the dead ones' addresses."""
    return PrefixStore(f"paceline/attempt-{attempt}", store)


def of_session(store: Store, address: Address, rank: int) -> Store:
    """Give each session of a process keys of its own, where the launcher keeps the store.

    Other stores end with the session, and a rank that comes twice to one of them is an error.

    Args:
        rank: This worker's: all count their sessions alike.
    """
    if address.scheme != "agent":
        return store
    return PrefixStore(f"session-{store.add(f'sessions/{rank}', 1)}", store)


@cache  # once a process
def meet_in_file(path: str) -> None:
    """Make plain PyTorch in this process (`init_process_group`, env://) use a file store too.

    The launcher of workers on one machine keeps no store at MASTER_PORT, since every user of the
    machine could reach it. A script that sets a port of its own meets there, as it wants.
    """
    # torch has no public way to replace the handler of env://, which scripts use.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    usual, times = handlers["env"], itertools.count()

    def by_file(
        url: str, timeout: timedelta = default_pg_timeout, **others: object
    ) -> Iterator[tuple[Store, int, int]]:
        """Give store, rank and world size as torch's handler does, once for each group."""
        if store_file(read_environment()) != path:
            yield from usual(url, timeout=timeout, **others)
            return
        query = dict(parse_qsl(urlsplit(url).query))
        rank, world_size = (
            int(query.get(name) or read_environment()[name.upper()])
            for name in ("rank", "world_size")
        )
        store = _file_store(Address(scheme="agent", path=path), timeout)
        # A group that is made again must not find addresses of the one before.
        yield PrefixStore(f"script/{next(times)}", store), rank, world_size

    handlers["env"] = by_file


def _file_store(address: Address, timeout: timedelta) -> Store:
    path = Path(address.path)
    if not path.parent.is_dir():
        raise UsageError(
            f"--init-method {address}: there is no directory {path.parent} here. Name a new file "
            "in a directory that all workers share"
        )
    try:
        store = FileStore(address.path)  # `leave` removes it, or the launcher
    except RuntimeError as error:
        raise UsageError(f"--init-method {address} can't be written: {error}") from error
    # Never destroyed: torch's destructor writes to the file, and makes it anew where the last
    # worker to leave has just removed it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    store.set_timeout(timeout)
    return store


def _listener(host: str, address: Address) -> socket.socket:
    """Bind the store's socket here: a store that binds by itself listens on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise UsageError(
                f"rank 0 should listen at {address}, but {host} is none of this host's addresses "
                f"({', '.join(sorted(own_addresses()))}). Name the host of rank 0, by its private "
                "address where it has two; or say --interface NAME on rank 0, to listen there"
            ) from error
        raise InfrastructureError(
            f"rank 0 can't listen at {address}: {error.strerror}. Another training may be "
            "running, or a process group of this script's own that it has not destroyed; choose "
            "another port (MASTER_PORT, or --init-method tcp://HOST:PORT)"
        ) from error


def _wait_for_all(store: Store, address: Address, placement: Placement, timeout_s: float) -> None:
    try:
        store.wait(["all"], timedelta(seconds=timeout_s))
        outcome = store.get("all").decode()
    except RuntimeError as error:
        missing = []
        with suppress(RuntimeError):  # rank 0 has gone, and its store with it
            ranks = range(placement.world_size)
            missing = [rank for rank in ranks if not store.check([f"arrived/{rank}"])]
        who = f"ranks {missing} did not come" if missing else "rank 0 went away"
        raise InfrastructureError(
            f"{who} to {address} within {timeout_s:g} s. Start all {placement.world_size} "
            "workers, each with its own rank and the same world size"
        ) from error
    if outcome != "here":
        raise UsageError(outcome)


def _address_in_use(address: Address, rank: int) -> str:
    if address.scheme == "file":
        return (
            f"{address.path} holds the meeting of an earlier training, or two workers have rank "
            f"{rank}. Remove the file, or name a new one for each training"
        )
    return (
        f"two workers with rank {rank} came to {address}: give each its own --rank, and each "
        "training its own port"
    )


def this_node() -> str:
    """Tell nodes apart: by host, its boot and its network, since containers may share names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(Path("/proc/self/ns/net").readlink())
    except OSError:  # not Linux
        boot = network = ""
    return f"{socket.gethostname()} {boot} {network}"

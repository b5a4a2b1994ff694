"""GPUs of one host, and whether all hosts have the same."""

from collections import Counter
from collections.abc import Iterator, Mapping

from paceline.doctor.check_result import CheckResult, common, fault, ok, warning
from paceline.doctor.checks.machine import Requirements
from paceline.doctor.facts import GpuFacts, HostFacts
from paceline.options.figures import plural, show_bytes
from paceline.options.text import clause

_USED_SHARE = 0.1


def check_gpus(host: str, gpus: GpuFacts, required: Requirements) -> Iterator[CheckResult]:
    """Check the GPUs of one host."""
    # Without usable GPUs there is nothing else to check.
    if gpus.problem:
        yield fault(
            host,
            "GPUs",
            f"they can't be used: {clause(gpus.problem)}. Do driver and PyTorch fit together?",
        )
        return
    if not gpus.names:
        yield ok(host, "GPUs", "none")
        return
    # Each worker needs one of its own.
    if required.on_gpus and required.workers > len(gpus.names):
        yield fault(
            host,
            "GPUs",
            f"{plural(required.workers, 'worker')} need as many GPUs, and there are "
            f"{len(gpus.names)}. Give the host {plural(len(gpus.names), 'worker')}",
        )
    else:
        yield ok(host, "GPUs", described(gpus))
    # The probe has copied known data from each GPU to the others.
    if gpus.wrong_copies:
        yield fault(
            host,
            "GPU copies",
            f"data is damaged on the way from {', '.join(gpus.wrong_copies)}: disable PCI access "
            "control (ACS) and the IOMMU in the firmware, or set NCCL_P2P_DISABLE=1; otherwise "
            "take the host out",
        )
    else:
        yield ok(host, "GPU copies", "right on all links between the GPUs")
    yield from _used(host, gpus)


def check_same_gpus(facts: Mapping[str, HostFacts]) -> Iterator[CheckResult]:
    """Compare the hosts: the slowest GPU sets the pace of all."""
    shown = {host: described(known.gpus) for host, known in facts.items()}
    models = {host: sorted(set(known.gpus.names)) for host, known in facts.items()}
    # Within a host.
    mixed = [host for host, names in models.items() if len(names) > 1]
    for host in mixed:
        yield warning(
            host,
            "GPU models",
            f"{shown[host]}: the slowest sets the pace. Use GPUs of one kind",
        )
    # Between hosts: each against what most of them have.
    named = {host: " and ".join(names) or "none" for host, names in models.items()}
    usual = common(list(named.values())) if named else ""
    for host, model in named.items():
        if model == usual or host in mixed:
            continue
        if "none" in (model, usual):
            text = f"it has {_or_no(model)}, and most hosts have {_or_no(usual)}: give --device cpu"
            yield fault(host, "GPU models", f"{text}, or leave it out")
        else:
            text = f"it has {model}, most hosts have {usual}: the slowest sets the pace"
            yield warning(host, "GPU models", f"{text}: the slowest sets the pace")


def described(gpus: GpuFacts) -> str:
    """Write a host's GPUs: `4 x NVIDIA A10G`."""
    counted = Counter(gpus.names)
    return ", ".join(f"{number} x {name}" for name, number in counted.items()) or "no GPUs"


def _or_no(model: str) -> str:
    return "no GPU" if model == "none" else model


def _used(host: str, gpus: GpuFacts) -> Iterator[CheckResult]:
    sizes = zip(gpus.memory_bytes, gpus.free_bytes, strict=False)
    used = {i: total - free for i, (total, free) in enumerate(sizes)}
    busy = [i for i, size in used.items() if size > _USED_SHARE * gpus.memory_bytes[i]]
    if busy:
        listed = ", ".join(f"GPU {i} {show_bytes(used[i])}" for i in busy)
        yield warning(
            host, "GPU memory", f"something else uses {listed}: nvidia-smi shows what. End it"
        )

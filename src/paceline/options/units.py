"""Figures as the doctor writes them."""


def show_size(size_bytes: float) -> str:
    """Write a size: `512 MB`, `1.5 GB`."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def show_bandwidth(bytes_per_s: float) -> str:
    """Write a network's speed, in bits as networks are sold: `941 Mbit/s`, `9.4 Gbit/s`."""
    bits = bytes_per_s * 8
    if bits >= 999.5e6:
        return f"{bits / 1e9:.3g} Gbit/s"
    return f"{bits / 1e6:.3g} Mbit/s"


def show_time(seconds: float) -> str:
    """Write a short time: `85 µs`, `1.2 ms`, `3 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"

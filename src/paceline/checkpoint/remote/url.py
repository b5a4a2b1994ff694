"""Checks URLs of remote storage, and removes secrets from URLs and messages."""

import re

from paceline.errors import UsageError
from paceline.options.text import clause

OFF = "none"
"""What `--copy-to` is given to copy nothing any more."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/@]*@)?([^\s?#\"'<>]*)([?#][^\s\"'<>]*)?")
_NAMED = re.compile(
    r"(?i)([\w-]*(?:secret|token|password|passwd|signature|credential|access.?key)[\w-]*"
    r"[\"']?\s*[=:]\s*[\"']?)[^\s,;&\"'<>]+"
)
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}")
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")
_MAX_CHARACTERS = 300


def is_url(text: str) -> bool:
    """Tell whether a user means a place elsewhere rather than a local path."""
    return _URL.fullmatch(text) is not None


def check_url(text: str, option: str) -> str:
    """Check a URL that a user gives.

    Args:
        text: Such as `s3://bucket/prefix`, `gs://bucket/prefix` or `file:///mnt/disk`.

    Returns:
        The URL without a slash at its end.

    Raises:
        UsageError: It can't be one, or holds what may be a secret; the message doesn't repeat that.
    """
    shown, match = without_secrets(text), _URL.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{option} is {shown!r}, not a URL. Write for example s3://bucket/prefix, "
            "gs://bucket/prefix or file:///mnt/disk"
        )
    scheme, rest = match[1], match[2].rstrip("/")
    # What may be a secret: a password before the host, a query after the path.
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise UsageError(
            f"{option} holds a password ({shown}): it would stand in run.json and in logs. Leave "
            "it out; the store's own configuration or environment variables have credentials"
        )
    if any(mark in rest for mark in "?#"):
        raise UsageError(
            f"{option} is {shown!r} and something after it: what stands behind ? or # may be a "
            "secret and isn't taken. Leave it out"
        )
    # The place: a host or bucket, or an absolute path.
    parts = rest.split("/")
    is_absolute = parts[0] == "" if scheme == "file" else parts[0] != ""
    if not is_absolute or ".." in parts or not rest.isprintable() or any(map(str.isspace, rest)):
        what = "three slashes and a path" if scheme == "file" else "a bucket's or host's name"
        raise UsageError(
            f"{option} is {shown!r}; after {scheme}: it needs {what}, without spaces and '..'"
        )
    return f"{scheme}://{rest}"


def copies_of(url: str, name: str) -> str:
    """Name the place of one run's copies."""
    return f"{url}/{_UNFIT.sub('-', name)}"


def without_secrets(text: str) -> str:
    """Leave out of a text what may be a secret: passwords and queries in URLs, `token=...`."""
    text = _IN_URL.sub(lambda match: f"{match[1]}{match[3]}", text)
    text = _AUTHORIZATION.sub(r"\1 ***", text)
    return _NAMED.sub(r"\1***", text)


def reason_of(error: BaseException) -> str:
    """Say in one short line, without secrets, what a store's library raised."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"  # without Python's [Errno 2]
    line = " ".join(without_secrets(text).split())[:_MAX_CHARACTERS]
    return clause(line or error)

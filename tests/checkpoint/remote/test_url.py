"""URLs of copies, and what messages about them leave out."""

import errno

import pytest

from paceline.checkpoint.options import SnapshotOptions
from paceline.checkpoint.remote.url import check_url, copies_of, is_url, reason_of, without_secrets
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("file:///mnt/disk//", "file:///mnt/disk"),
        ("abfs://box@account.dfs.core.windows.net/x", "abfs://box@account.dfs.core.windows.net/x"),
        ("sftp://me@host/x", "sftp://me@host/x"),
    ],
)
def test_urls_are_taken(given: str, kept: str) -> None:
    assert check_url(given, "--copy-to") == kept
    assert SnapshotOptions(copy_to=given).copy_url == kept


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("bucket/prefix", "not a URL"),
        ("/mnt/disk", "not a URL"),
        ("s3:/bucket", "not a URL"),
        ("s3:///prefix", "a bucket's or host's name"),
        ("s3://", "a bucket's or host's name"),
        ("file://mnt/disk", "three slashes"),
        ("s3://bucket/a/../b", "without spaces"),
        ("s3://bucket/a b", "without spaces"),
        ("s3://bucket/a\x1b", "without spaces"),
        ("s3://me:hunter2@bucket/x", "holds a password"),
        ("sftp://me:hun/ter2@host/x?", "behind"),
        ("s3://bucket/x?X-Amz-Signature=hunter2", "behind"),
        ("https://host/x#hunter2", "behind"),
    ],
)
def test_others_are_refused_without_repeating_secrets(given: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        SnapshotOptions(copy_to=given)
    assert "--copy-to" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_none_copies_nothing() -> None:
    assert SnapshotOptions(copy_to="none").copy_url is None
    assert SnapshotOptions().copy_url is None


def test_the_wait_has_a_range() -> None:
    with pytest.raises(UsageError, match="--copy-wait-s is -1"):
        SnapshotOptions(copy_wait_s=-1)


def test_a_run_has_a_place_of_its_own() -> None:
    assert copies_of("s3://bucket/x", "digits-1") == "s3://bucket/x/digits-1"
    assert copies_of("s3://bucket", "my run/ü") == "s3://bucket/my-run--"
    assert is_url(copies_of("s3://bucket", "a"))
    assert not is_url("runs/a")


@pytest.mark.parametrize(
    "said",
    [
        "GET https://me:hunter2@host/x failed",
        "GET https://host/x?X-Amz-Signature=hunter2&y=1 failed",
        "aws_secret_access_key = hunter2, please",
        "{'token': 'hunter2'}",
        "Authorization: Bearer hunter2hunter2",
    ],
)
def test_messages_hold_no_secrets(said: str) -> None:
    assert "hunter2" not in without_secrets(said)


def test_what_the_system_says_has_no_number() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/b")
    assert reason_of(error) == "/proc/b: No such file or directory"


def test_other_messages_stay() -> None:
    text = "PutObject to s3://bucket/x/step-1: connection refused (127.0.0.1:80)"
    assert without_secrets(text) == text

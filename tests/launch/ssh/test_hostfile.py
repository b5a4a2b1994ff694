import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.launch.ssh.hostfile import (
    Host,
    hostfile_line,
    is_host_name,
    parse_hostfile,
    parse_hosts,
)


def test_hosts_with_workers_and_users() -> None:
    assert parse_hosts("node0:4,alice@node1:2, 10.0.0.7,[fd00::1]:3,fd00::2") == (
        Host(name="node0", slots=4),
        Host(name="node1", slots=2, user="alice"),
        Host(name="10.0.0.7"),
        Host(name="fd00::1", slots=3),
        Host(name="fd00::2"),
    )


def test_a_hostfile_has_a_host_a_line_and_comments() -> None:
    text = """
    # two nodes of the cluster
    node0 slots=4 address=10.0.0.4   # the first
    bob@node1:2 port=2222 python=/opt/env/bin/python dir='/data/my code'
    """
    assert parse_hostfile(text) == (
        Host(name="node0", slots=4, address="10.0.0.4"),
        Host(
            name="node1",
            slots=2,
            user="bob",
            port=2222,
            python="/opt/env/bin/python",
            directory="/data/my code",
        ),
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty name"),
        ("a,,b", "empty name"),
        ("-oProxyCommand=x", "no host name"),
        ("a;id", "no host name"),
        ("$(id)", "no host name"),
        ("a b", "no host name"),
        ("[fe80::1%$(id);a b]", "no host name"),
        ("[fe80::1%]", "no host name"),
        ("[fe80::1%-x]", "no host name"),
        ("-l@a", "no user name"),
        ("a:0", "at least 1"),
        ("a:x", "'x' is no number of workers. Write a whole number, as in --hosts node0:4"),
        ("a:", "'a:' has no number of workers after its colon"),
        ("[fd00::1]:", "has no number of workers after its colon"),
        ("a:²", "no number of workers"),
        ("a,b,a:2", "named twice"),
    ],
)
def test_what_is_no_host_is_refused(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a\nb slots=two", "line 2: 'two' is no number of slots"),
        ("a gpus=2", "line 1: 'gpus=2' is unknown. Known: slots, user"),
        ("a port=99999", "no port"),
        ("a address=-x", "no address"),
        ("a python=''", "no path"),
        ("a python=~/venv/bin/python", "write the absolute path"),
        ("# nothing", "names no host"),
        ("a 'open", "line 1"),
    ],
)
def test_a_line_that_cant_be_read_is_named(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        parse_hostfile(text)


def test_a_host_is_written_as_it_is_read() -> None:
    host = Host(name="n", slots=2, user="u", port=5, address="fd00::2", directory="/a b")
    assert parse_hostfile(hostfile_line(host)) == (host,)


def test_an_address_of_a_link_names_its_interface() -> None:
    assert is_host_name("fe80::1%eth0.100")


@given(st.text(max_size=20))
@pytest.mark.slow
def test_no_name_can_be_an_option_or_more_than_a_word(text: str) -> None:
    if is_host_name(text):
        assert not text.startswith("-")
        assert not set(text) & set(" \t\n;&|`$<>()'\"\\@=/")

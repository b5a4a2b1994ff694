from paceline.data.splitmix import GOLDEN, Domain, derive_key, mix64


def test_mix64_is_splitmix64() -> None:
    """The published sequence of splitmix64 for the seed 1234567."""
    outputs = [mix64(1234567 + step * GOLDEN) for step in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_differ_by_domain_part_and_order() -> None:
    keys = {
        derive_key(Domain.ORDER),
        derive_key(Domain.ORDER, 0),
        derive_key(Domain.ORDER, 0, 0),
        derive_key(Domain.ORDER, 0, 1),
        derive_key(Domain.ORDER, 1, 0),
        derive_key(Domain.ITEM, 1, 0),
        derive_key(Domain.ITEM, -1, 0),
    }
    assert len(keys) == 7
    assert all(0 <= key < 1 << 64 for key in keys)


def test_a_key_is_splitmix64s_next_output_after_each_part() -> None:
    """Of the published sequences: the first output for the seed 0, and then that for 1234567."""
    first = 0xE220A8397B1DCDAF
    assert derive_key(Domain.ORDER) == first
    assert derive_key(Domain.ORDER, first ^ 1234567) == 6457827717110365317

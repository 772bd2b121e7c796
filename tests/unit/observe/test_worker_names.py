"""Which workers a command is for."""

from __future__ import annotations

import pytest

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.observe import worker_names

ONE, TWO, ALIKE = 0xA1B2C3D4E5F60718, 0x1122334455667788, 0xA1B2C3FFE5F60718


def test_short_names_are_as_long_as_needed() -> None:
    assert worker_names.short([ONE, TWO]) == {ONE: "a1b2c3", TWO: "112233"}
    assert worker_names.short([ONE, ALIKE]) == {ONE: "a1b2c3d", ALIKE: "a1b2c3f"}
    assert worker_names.short([]) == {}


def test_worker_is_a_number_of_the_table_or_letters_of_its_instance() -> None:
    meant = {"1": TWO, "2": ONE, "a1b2c3d": ONE, "A1B2C3F": ALIKE, "11": TWO, str(ONE): ONE}
    assert {word: worker_names.pick([TWO, ONE, ALIKE], word) for word in meant} == meant
    for word, message in {
        "4": "--worker 4 is not a worker; 'dynamo-vllm status' shows them: 1122334, a1b2c3d, a1b2c3f",
        "0": "--worker 0 is not a worker",
        "a1b": "--worker a1b matches several workers; 'dynamo-vllm status' shows them: a1b2c3d, a1b2c3f",
        "zz": "--worker zz is not a worker",
    }.items():
        with pytest.raises(ConfigError) as refused:
            worker_names.pick([TWO, ONE, ALIKE], word)
        assert str(refused.value).startswith(message)


def test_whole_instance_may_lack_its_zeros() -> None:
    small = 0xA1B2C3D4E5F607
    assert worker_names.short([small]) == {small: "00a1b2"}
    assert worker_names.pick([small, small << 8], "a1b2c3d4e5f607") == small


def test_one_worker_needs_no_name_and_several_do() -> None:
    assert worker_names.choose([ONE], None, wants_all=False) == [ONE]
    assert worker_names.choose([ONE, TWO], None, wants_all=True) == [ONE, TWO]
    assert worker_names.choose([ONE, TWO], "2", wants_all=True) == [TWO]
    with pytest.raises(ConfigError, match="there are 2 workers; give --all or --worker ID; .*112233"):
        worker_names.choose([ONE, TWO], None, wants_all=False)

# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_topology import cpulist, links


@given(st.sets(st.integers(0, 300)).filter(bool))
def test_a_list_survives_the_round_trip(members):
    assert cpulist.parse(cpulist.format_list(members)) == members


def test_runs_are_joined():
    assert cpulist.format_list([5, 4, 7, 0, 1, 2, 2]) == "0-2,4-5,7"
    assert cpulist.format_list([]) == ""


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "1-", "-1", "0-99999999", "N/A"])
def test_what_is_no_list_is_an_error(text):
    with pytest.raises(ValueError, match="is not a"):
        cpulist.parse(text)


def test_order_of_links():
    order = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV4", "NV12", "NV18"]
    assert [links.rank(link) for link in order] == sorted(links.rank(link) for link in order)
    assert len({links.rank(link) for link in order}) == len(order)
    assert [links.link_of(links.rank(link)) for link in order] == order
    with pytest.raises(ValueError, match="tuple"):
        links.rank("X")

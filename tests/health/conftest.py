# SPDX-License-Identifier: Apache-2.0
import pytest
from stub_engine import stub_engine


@pytest.fixture
def engine():
    with stub_engine() as stub:
        yield stub

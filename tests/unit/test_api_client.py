# SPDX-License-Identifier: Apache-2.0
"""How the answers of two servers are compared, in tests/engine/api_client.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from api_client import differences


def chat(*entries):
    return {
        "top_logprobs": [
            {"token": token, "logprob": score, "bytes": list(token.encode())}
            for token, score in entries
        ]
    }


def completion(*positions):
    return {"top_logprobs": [dict(position) for position in positions]}


@pytest.mark.parametrize("of", [chat, lambda *entries: completion(entries)])
class TestTopScores:
    def test_tokens_of_one_score_may_change_places(self, of):
        expected = of(("a", -0.5), ("b", -2.0), ("c", -2.00005))
        assert differences(expected, of(("a", -0.5), ("c", -2.0), ("b", -2.00005))) == []

    def test_which_of_two_as_likely_tokens_comes_last_is_free(self, of):
        expected = of(("a", -0.5), ("b", -2.0))
        assert differences(expected, of(("a", -0.5), ("c", -2.00005))) == []

    def test_a_token_that_is_clearly_likelier_must_be_there(self, of):
        found = differences(of(("a", -0.5), ("b", -2.0)), of(("a", -0.5), ("c", -2.1)))
        assert any("'b'" in sentence or "('b'" in sentence for sentence in found)

    def test_tokens_that_are_ruled_out_are_equally_likely(self, of):
        expected = of(("a", -0.5), ("b", -9999.0))
        assert differences(expected, of(("a", -0.5), ("c", -9999.0))) == []

    def test_a_score_within_the_tolerance_is_no_tie(self, of):
        """Scores may differ by 0.002; which token is the likelier one may not depend on that."""
        expected = of(("a", -0.5), ("b", -2.0), ("c", -2.001))
        assert differences(expected, of(("a", -0.5), ("c", -2.0), ("b", -2.001)))
        assert differences(of(("a", -0.5), ("b", -2.0)), of(("b", -0.5), ("c", -2.001)))

    def test_a_score_of_a_token_must_agree(self, of):
        """Each rank has its score, but two tokens have each other's."""
        found = differences(of(("a", -0.5), ("b", -2.0)), of(("b", -0.5), ("a", -2.0)))
        assert len(found) == 2

    def test_a_missing_entry_is_a_difference(self, of):
        assert differences(of(("a", -0.5), ("b", -2.0)), of(("a", -0.5)))


def test_positions_of_a_completion_are_compared_one_by_one():
    expected = completion([("a", -0.5)], [("b", -1.0)])
    assert differences(expected, expected) == []
    assert differences(expected, completion([("b", -1.0)], [("a", -0.5)]))
    assert differences(expected, completion([("a", -0.5)]))


def test_the_first_token_of_an_echoed_prompt_has_no_scores():
    first = {"top_logprobs": [None, {"a": -0.5, "b": -2.0}]}
    assert differences(first, first) == []
    assert differences(first, {"top_logprobs": [None, {"a": -0.5, "c": -2.00005}]}) == []
    assert differences(first, {"top_logprobs": [{"a": -0.5, "b": -2.0}, None]})


def test_a_text_of_the_model_may_be_called_as_an_entry_is():
    position = completion([("token", -0.5), ("logprob", -1.0), ("bytes", -2.0)])
    assert differences(position, position) == []


@pytest.mark.parametrize("other", [None, [], [None]])
def test_null_is_not_a_list_of_scores(other):
    assert differences(chat(("a", -0.5)), {"top_logprobs": other})
    assert differences({"top_logprobs": other}, {"top_logprobs": other}) == []


def test_tokens_of_one_text_are_compared_in_order():
    twice = chat(("�", -1.0), ("�", -2.0))
    assert differences(twice, twice) == []
    assert differences(twice, chat(("�", -1.0), ("�", -3.0)))

# SPDX-License-Identifier: Apache-2.0
"""Equality of two runs as far as bfloat16 allows it.

Products of other shapes (a padded graph, half the heads on a second GPU) are rounded otherwise, and
logits in bfloat16 are a sixteenth apart at 8 to 16. So tokens may differ where two of them were about
as likely. Nowhere else, and what was said before has the same log-probabilities: a state that took
in a wrong row moves them by whole units.
"""

from __future__ import annotations

from typing import Any

from harness import Result

# Nats. Several roundings of a logit; a wrong state or mask costs more at one token in two.
SLACK = 0.4
# Requests that must agree to the last token.
MOST = 0.6

# For the engine options of runs to be compared: scores are those that the token was chosen by.
SCORED = {"logprobs_mode": "processed_logprobs"}


def scored(params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters with the scores that a comparison reads."""
    return params | {"logprobs": 5}


def assert_same_up_to_rounding(
    expected: Result, got: Result, requests: list[dict[str, Any]]
) -> None:
    """Both runs were given ``requests``, whose parameters are `scored`."""
    same = 0
    for number, (one, other) in enumerate(zip(expected.outputs, got.outputs, strict=True)):
        assert other["finish_reason"] == one["finish_reason"], number
        assert len(other["token_ids"]) == len(one["token_ids"]), number
        same += one["token_ids"] == other["token_ids"]
        _assert_alike(one, other, requests[number]["params"]["temperature"] == 0, number)
    share = same / len(expected.outputs)
    print(f"{share:.0%} of {len(expected.outputs)} requests are equal to the last token")
    assert share >= MOST


def _assert_alike(one: dict[str, Any], other: dict[str, Any], greedy: bool, number: int) -> None:
    steps = zip(
        one["token_ids"], other["token_ids"], one["logprobs"], other["logprobs"], strict=True
    )
    for place, (token, found, scores, found_scores) in enumerate(steps):
        where = f"request {number}, token {place}"
        if token == found:
            gap = abs(scores[str(token)] - found_scores[str(token)])
            # Far down the distribution small differences of logits are large ones of logarithms.
            if scores[str(token)] > -5:
                assert gap < SLACK, f"{where}: log-probabilities are {gap:.2f} apart"
            continue
        # From here on the texts differ. A sampled token may have been chosen by the noise.
        if greedy:
            gap = scores[str(token)] - scores.get(str(found), float("-inf"))
            assert gap < SLACK, f"{where}: {found} instead of {token}, {gap:.2f} less likely"
        return

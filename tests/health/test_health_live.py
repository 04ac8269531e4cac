# SPDX-License-Identifier: Apache-2.0
"""The rule of liveness: progress on unanswered work, whatever /health says."""

import pytest

from ddtree_health.live import Clock, judge
from ddtree_health.server import RUNNING, STEPS, WAITING, Sample

LIMIT = 60.0


def look(at, steps, running=0, waiting=0):
    return Sample(at, {STEPS: steps, RUNNING: running, WAITING: waiting})


def silent(at):
    return Sample(at, None, "/metrics did not answer within 10 s")


def run(*looks, clock=None, **more):
    """Judges each look in a run of its own; returns the last result."""
    clock = clock or Clock()
    for sample in looks:
        result, clock = judge(clock, [sample], stall_after_s=LIMIT, **more)
    return result


def test_running_requests_and_frozen_counters_are_a_hang():
    result = run(look(0, 5, running=2), look(30, 5, running=2), look(60, 5, running=2))
    assert (result.status, result.hung) == ("fail", True)
    assert result.because == "hung: 2 requests in the engine and no counter moves, for 60 s"


def test_before_the_limit_it_is_a_suspicion_only():
    result = run(look(0, 5, running=2), look(59, 5, running=2))
    assert (result.status, result.hung) == ("unknown", False)
    assert result.data["stalled_seconds"] == 59


def test_waiting_requests_count_as_work():
    assert run(look(0, 5, waiting=1), look(60, 5, waiting=1)).hung


def test_one_step_within_the_limit_is_life():
    looks = [look(30 * i, i // 2, running=4) for i in range(20)]
    assert not run(*looks).hung


def test_an_engine_idle_for_hours_is_not_hung_by_its_first_request():
    result = run(look(0, 5), look(7200, 5), look(7201, 5, running=1))
    assert (result.status, result.data["stalled_seconds"]) == ("unknown", 0)


def test_idle_time_between_two_requests_does_not_add_up():
    looks = (look(0, 5, running=1), look(40, 5), look(80, 5, running=1))
    assert run(*looks).data["stalled_seconds"] == 0


def test_an_idle_engine_that_does_not_answer_our_completion_is_hung():
    clock = Clock()
    for start in (0.0, 45.0):
        result, clock = judge(
            clock,
            [look(start, 5), look(start + 30, 5)],
            stall_after_s=LIMIT,
            unanswered_since=start,
        )
    assert result.hung
    assert result.because == "hung: a completion is not answered and no counter moves, for 75 s"


def test_a_busy_engine_that_does_not_answer_our_completion_is_alive():
    clock = Clock()
    for start in range(0, 600, 45):
        result, clock = judge(
            clock,
            [look(start, start), look(start + 30, start + 7, running=64)],
            stall_after_s=LIMIT,
            unanswered_since=float(start),
        )
        assert result.status == "pass"
    assert result.because == "45 steps since the last look, 64 requests in the engine"


def test_a_server_that_answers_nothing_is_hung():
    assert not run(look(0, 5), silent(10), silent(69)).hung
    assert run(look(0, 5), silent(10), silent(70)).hung


def test_an_answer_in_between_starts_the_clock_anew():
    assert not run(silent(0), look(50, 5), silent(90), silent(120)).hung


def test_work_frozen_before_and_after_a_silence_is_one_hang():
    assert run(look(0, 5, running=1), silent(30), look(60, 5, running=1)).hung


@pytest.mark.parametrize("at", [59, 60])
def test_a_dead_engine_behind_a_living_server_is_hung_at_the_limit(at):
    result = run(look(0, 5), look(at, 5), engine_dead=True)
    assert result.hung == (at == 60)


def test_the_clock_survives_the_state_file():
    clock = Clock({STEPS: 3.0}, 12.5)
    assert Clock.from_state({"clock": clock.as_state()}) == clock
    assert Clock.from_state({}) == Clock()


def test_a_restarted_engine_counts_from_nought_and_lives():
    assert not run(look(0, 500, running=1), look(100, 2, running=1)).hung

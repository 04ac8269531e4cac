# SPDX-License-Identifier: Apache-2.0
"""When people are told: of what lasts, once, and of its end."""

import pytest

from ddtree_health import alerts
from ddtree_health.report import FAIL, PASS, SKIP, UNKNOWN, Report, Result

AFTER = 60.0


class Runs:
    """Runs of the checks at given seconds; `sentences` is what they left to be told."""

    def __init__(self):
        self.kept = {}

    def __call__(self, now, start="first", hung=False, **statuses):
        results = [
            Result(check, status, f"{check} at {now}", hung=hung and check == "live")
            for check, status in statuses.items()
        ]
        report = Report("0", tuple(results), now)
        self.kept = alerts.judge(self.kept, report, start=start, now=now, after_s=AFTER)

    @property
    def sentences(self):
        return [f"{priority}: {sentence}" for priority, sentence in self.kept["pending"]]


def test_a_failure_is_told_when_it_has_lasted_and_not_again():
    runs = Runs()
    for now in range(0, 60, 15):
        runs(now, gpu=FAIL, live=PASS)
    assert runs.sentences == []
    for now in range(60, 600, 15):
        runs(now, gpu=FAIL, live=PASS)
    assert runs.sentences == ["alert: is unhealthy: gpu: gpu at 60"]


def test_a_pass_starts_the_clock_anew():
    runs = Runs()
    for now in range(0, 600, 30):
        runs(now, generates=PASS if now % 60 else FAIL)
    assert runs.sentences == []


def test_another_failure_is_told_beside_the_first():
    runs = Runs()
    for now in range(0, 200, 20):
        runs(now, gpu=FAIL, drafts=FAIL if now >= 100 else PASS)
    assert runs.sentences == [
        "alert: is unhealthy: gpu: gpu at 60",
        "alert: is unhealthy: gpu: gpu at 160; drafts: drafts at 160",
    ]


def test_the_end_is_told_when_it_has_lasted():
    runs = Runs()
    for now in range(0, 61, 20):
        runs(now, gpu=FAIL)
    for now in range(80, 140, 20):
        runs(now, gpu=PASS)
    assert len(runs.sentences) == 1
    runs(140, gpu=PASS)
    assert runs.sentences[1:] == ["notice: is healthy again"]
    runs(300, gpu=PASS)
    assert len(runs.sentences) == 2


def test_a_failure_that_comes_and_goes_is_told_once():
    runs = Runs()
    for now in range(0, 1000, 10):
        runs(now, generates=FAIL if now % 200 < 170 else PASS)
    assert len(runs.sentences) == 1


def test_a_hang_is_told_at_once():
    runs = Runs()
    runs(0, live=FAIL, generates=FAIL, hung=True)
    assert runs.sentences == ["alert: is hung: live: live at 0; generates: generates at 0"]


def test_a_hang_of_a_failure_that_was_told_is_told_too():
    runs = Runs()
    for now in range(0, 61, 20):
        runs(now, live=PASS, generates=FAIL)
    runs(80, live=FAIL, generates=FAIL, hung=True)
    assert [sentence.split(":")[1] for sentence in runs.sentences] == [" is unhealthy", " is hung"]


def test_a_start_is_no_failure_and_no_recovery():
    runs = Runs()
    runs(0, live=FAIL, hung=True)
    for now in range(15, 600, 15):
        runs(now, start="", live=UNKNOWN, ready=FAIL)
    assert len(runs.sentences) == 1
    for now in range(600, 661, 15):
        runs(now, live=PASS, ready=PASS)
    assert runs.sentences[1:] == ["notice: is healthy again"]


def test_the_clock_of_a_failure_does_not_run_through_a_start():
    runs = Runs()
    runs(0, live=PASS, generates=FAIL)
    runs(15, start="", live=UNKNOWN, ready=FAIL)
    runs(300, start="second", live=PASS, generates=FAIL)
    assert runs.sentences == []
    # The timer rests while an engine starts: mostly no run sees it.
    runs(500, start="third", live=PASS, generates=FAIL)
    assert runs.sentences == []
    runs(560, start="third", live=PASS, generates=FAIL)
    assert len(runs.sentences) == 1


def test_a_gpu_that_fails_before_and_after_a_start_has_failed_all_the_time():
    runs = Runs()
    runs(0, gpu=FAIL)
    runs(60, start="second", gpu=FAIL)
    assert len(runs.sentences) == 1


def test_seconds_of_an_earlier_boot_count_as_none():
    runs = Runs()
    runs(90_000, gpu=FAIL)
    runs(500, gpu=FAIL)
    runs(559, gpu=FAIL)
    assert runs.sentences == []
    runs(560, gpu=FAIL)
    assert len(runs.sentences) == 1


def test_what_nobody_takes_is_bounded_and_the_latest_is_kept():
    runs = Runs()
    for now in range(0, 10_000, 100):
        runs(now, gpu=FAIL if now % 400 < 200 else PASS)
    assert len(runs.sentences) == alerts.MOST_PENDING
    assert runs.sentences[-1].startswith("notice: ")


def test_a_gpu_lost_while_the_engine_starts_again_and_again_is_told():
    runs = Runs()
    for now in range(0, 61, 15):
        runs(now, start="", live=UNKNOWN, ready=FAIL, gpu=FAIL)
    assert runs.sentences == ["alert: is unhealthy: gpu: gpu at 60"]


def test_a_check_that_knows_nothing_ends_no_failure():
    runs = Runs()
    for now in range(0, 61, 15):
        runs(now, drafts=UNKNOWN if now == 30 else FAIL)
    assert runs.sentences == ["alert: is unhealthy: drafts: drafts at 60"]


@pytest.mark.parametrize(
    "damage",
    [
        {"failing": ["gpu"]},
        {"failing": {"gpu": "soon"}},
        {"told": "gpu"},
        {"told": [["gpu"]]},
        {"well_since": "then"},
        {"pending": {"alert": "x"}},
        {"pending": ["alert"]},
        {"pending": [["alert", 5]]},
        {"failing": None},
        {"at": "now"},
    ],
)
def test_a_damaged_record_begins_anew(damage):
    runs = Runs()
    for now in range(0, 46, 15):
        runs(now, gpu=FAIL)
    runs.kept = {**runs.kept, **damage}
    for now in range(60, 106, 15):
        runs(now, gpu=FAIL)
    assert runs.sentences == []
    runs(120, gpu=FAIL)
    assert runs.sentences == ["alert: is unhealthy: gpu: gpu at 120"]


def test_checks_that_do_not_apply_are_well():
    runs = Runs()
    for now in range(0, 600, 15):
        runs(now, gpu=SKIP, drafts=UNKNOWN)
    assert runs.sentences == []

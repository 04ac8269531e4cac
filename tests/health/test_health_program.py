# SPDX-License-Identifier: Apache-2.0
"""ddtree-health against a stub of the server: exit status, JSON, state, metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_health import cli, server, state
from ddtree_health.errors import HealthError
from ddtree_health.unit import Unit

ROOT = Path(__file__).parents[2]
SERVING = ["--checks", "live,ready,generates,drafts"]


@pytest.fixture
def check(engine, tmp_path, capsys):
    """Runs one check; returns (exit status, parsed JSON)."""

    def run(*arguments, url=engine.url):
        words = ["--url", url, "--json", "--state", str(tmp_path / "state.json")]
        words += ["--timeout", "0.5", "--generate-timeout", "0.3", "--interval", "0.05"]
        status = cli.main([*SERVING, *words, *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_healthy_engine(check, engine):
    status, report = check("--expect", "Paris", "--instance", "0")
    assert (status, report["verdict"], report["restart"]) == (0, "healthy", False)
    assert report["failures"] == []
    assert {name: c["status"] for name, c in report["checks"].items()} == {
        "live": "pass",
        "ready": "pass",
        "generates": "pass",
        "drafts": "skip",
    }
    assert engine.asked == 1


def test_200_while_the_engine_hangs_is_a_hang(check, engine):
    engine.hung = True
    engine.counters["running"] = 3
    status, report = check("--stall-after", "0.2")
    assert (status, report["verdict"], report["restart"]) == (2, "hung", True)
    assert report["checks"]["ready"]["status"] == "pass"


def test_a_hang_needs_its_whole_time(check, engine):
    engine.hung = True
    status, report = check("--stall-after", "600")
    assert (status, report["checks"]["live"]["status"]) == (1, "unknown")
    # The clock of the first run goes on: the second alone, 0.3 s long, could not fill its time.
    stalled = report["checks"]["live"]["stalled_seconds"]
    status, report = check("--stall-after", str(stalled + 0.3))
    assert status == 2


def test_a_slow_health_with_moving_counters_is_alive(check, engine):
    engine.busy, engine.health_delay_s = True, 2.0
    engine.counters["running"] = 64
    for _ in range(3):
        status, report = check("--stall-after", "0.2")
        assert status == 1  # our completion was not answered in time
        assert report["checks"]["live"]["status"] == "pass"
        assert report["checks"]["ready"]["status"] == "pass"
        assert "busy" in report["checks"]["generates"]["because"]


def test_a_silent_server_is_a_hang(check, engine):
    engine.silent = True
    assert check("--stall-after", "600")[0] == 1
    assert check("--stall-after", "0.4")[0] == 2
    assert engine.asked == 0


def test_nothing_on_the_port_is_a_hang_after_the_limit(check):
    free = "http://127.0.0.1:9"
    status, report = check("--stall-after", "60", url=free)
    assert (status, report["checks"]["ready"]["because"]) == (1, "nothing listens on port 9")
    assert check("--stall-after", "0", url=free)[0] == 2


def test_a_wrong_answer_fails_without_a_restart(check, engine):
    engine.text = "!!!!!!!!"
    status, report = check("--expect", "Paris")
    assert (status, report["restart"]) == (1, False)
    assert "continued '!!!!!!!!', without 'Paris'" in report["failures"][0]


@pytest.mark.parametrize("text", ["", " Paris"])
def test_an_empty_completion_fails(check, engine, text):
    engine.text = text
    assert check()[0] == (0 if text else 1)


def test_an_error_is_quoted_on_one_line(check, engine):
    engine.status = 500
    status, report = check()
    assert status == 1
    assert report["failures"] == [
        'generates: a completion was answered 500: {"error": "no such model"}'
    ]


def test_a_passed_completion_is_good_for_a_while(check, engine):
    for _ in range(3):
        assert check("--generate-every", "60")[0] == 0
    assert engine.asked == 1


def test_a_suspicion_asks_at_once(check, engine):
    assert check("--generate-every", "60")[0] == 0
    engine.hung = True
    engine.counters["running"] = 1
    check("--generate-every", "60")
    check("--generate-every", "60")
    assert engine.asked == 2


def test_the_acceptance_length_has_a_floor(check, engine):
    engine.step(drafts=100, accepted=250)
    status, report = check("--min-acceptance", "2")
    assert (status, report["checks"]["drafts"]["acceptance_length"]) == (0, 3.5)
    # A new window: the drafter has gone bad, which the sum since the start would hide.
    engine.step(drafts=100, accepted=10)
    status, report = check("--min-acceptance", "2")
    assert (status, report["checks"]["drafts"]["acceptance_length"]) == (1, 1.1)
    # Nothing new: still bad.
    assert check("--min-acceptance", "2")[0] == 1


def test_few_drafts_are_not_judged(check, engine):
    engine.step(drafts=10, accepted=0)
    status, report = check("--min-acceptance", "2")
    assert (status, report["checks"]["drafts"]["status"]) == (0, "unknown")


def test_tokens_without_drafts_fail(check, engine):
    engine.step(generated=1000)
    status, report = check("--min-acceptance", "2")
    assert status == 1
    assert "nothing was drafted" in report["failures"][0]


def test_the_api_key_comes_from_a_file(check, engine, tmp_path):
    engine.api_key = "secret"
    assert check()[0] == 1
    (tmp_path / "key").write_text("secret\n")
    assert check("--api-key-file", str(tmp_path / "key"))[0] == 0


def test_metrics_for_the_textfile_collector(check, engine, tmp_path):
    engine.step(drafts=100, accepted=250)
    check("--min-acceptance", "2", "--instance", 'a"b', "--textfile", str(tmp_path / "x.prom"))
    text = (tmp_path / "x.prom").read_text()
    assert 'ddtree_health_verdict{instance_name="a\\"b"} 0\n' in text
    assert 'ddtree_health_check{instance_name="a\\"b",check="live"} 1\n' in text
    assert 'ddtree_health_acceptance_length{instance_name="a\\"b"} 3.5\n' in text
    assert (tmp_path / "x.prom").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "x.prom"]


def test_metrics_that_cannot_be_kept_hide_no_hang(check, engine, tmp_path):
    """A full disk, here a folder that is not there."""
    nowhere = ("--textfile", str(tmp_path / "gone/x.prom"))
    assert check(*nowhere)[0] == 1
    engine.hung = True
    engine.counters["running"] = 3
    assert check(*nowhere, "--stall-after", "0")[0] == 2
    engine.hung = False
    # Without its clock a run judges by itself alone.
    assert check("--state", str(tmp_path / "gone/state.json"))[0] == 1


def test_a_damaged_state_file_begins_anew(check, tmp_path):
    (tmp_path / "state.json").write_text('{"incarnation"')
    assert check()[0] == 0
    assert "incarnation" in json.loads((tmp_path / "state.json").read_text())


def test_the_state_of_another_start_is_not_used(tmp_path):
    path = str(tmp_path / "state.json")
    state.write(path, json.dumps({"incarnation": "boot a", "clock": {"since": 1}}))
    assert state.load(path, "boot a")["clock"] == {"since": 1}
    assert state.load(path, "boot b") == {}


@pytest.mark.parametrize(
    ("active", "status", "live"),
    [("activating", 1, "unknown"), ("failed", 1, "fail"), ("inactive", 1, "fail")],
)
def test_a_unit_that_has_not_started_is_never_hung(monkeypatch, check, active, status, live):
    unit = Unit("ddtree-vllm@0.service", active, "start-post", "exit-code", "abc", 2)
    monkeypatch.setattr(cli.unit, "read", lambda name: unit)
    got, report = check("--unit", unit.name, "--stall-after", "0", url="http://127.0.0.1:9")
    assert (got, report["checks"]["live"]["status"]) == (status, live)
    assert report["restart"] is False


@pytest.fixture
def systemd(monkeypatch):
    """Stands in for systemctl: one active unit, whose invocation can be changed."""

    class Systemd:
        def __init__(self):
            self.invocation, self.killed = "abc", []

        def run(self, command):
            if command[1] == "kill":
                self.killed.append(command)
                return ""
            return f"LoadState=loaded\nActiveState=active\nInvocationID={self.invocation}\n"

    made = Systemd()
    monkeypatch.setattr(cli.unit, "run_command", made.run)
    read = cli.unit.read
    monkeypatch.setattr(cli.unit, "read", lambda name: read(name, made.run))
    return made


KILL = ["kill-hung", "--unit", "x.service", "--state"]


def test_a_hung_engine_is_killed(check, engine, systemd, tmp_path, monkeypatch):
    engine.silent = True
    assert check("--unit", "x.service", "--stall-after", "0")[0] == 2
    # The kill has another view of /proc than the sandboxed check: in containers another boot id.
    monkeypatch.setattr(state, "boot_id", lambda: "of the machine")
    assert cli.main([*KILL, str(tmp_path / "state.json")]) == 0
    assert systemd.killed == [["systemctl", "kill", "--signal=SIGKILL", "x.service"]]


def test_an_engine_started_since_the_judgement_is_not_killed(
    check, engine, systemd, tmp_path, capsys
):
    engine.silent = True
    assert check("--unit", "x.service", "--stall-after", "0")[0] == 2
    systemd.invocation = "def"
    assert cli.main([*KILL, str(tmp_path / "state.json")]) == 0
    assert systemd.killed == []
    assert "has been started anew" in capsys.readouterr().out


def test_without_a_judgement_nothing_is_killed(systemd, tmp_path, capsys):
    (tmp_path / "state.json").write_text("{")
    assert cli.main([*KILL, str(tmp_path / "state.json")]) == 1
    assert systemd.killed == []
    assert "nothing is killed" in capsys.readouterr().err


@pytest.fixture
def tell(tmp_path, monkeypatch):
    """Runs `tell` with a journal that is a file; returns (exit status, journal, what was heard)."""
    journal, heard = tmp_path / "journal", tmp_path / "heard"
    program = tmp_path / "systemd-cat"
    program.write_text(f'#!/bin/sh\necho "$@" >>{journal}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(script=f'echo "$0|$1" >>{heard}'):
        words = ["tell", "--unit", "x.service", "--alerts", str(tmp_path / "alerts.json")]
        status = cli.main([*words, "--", "/bin/sh", "-c", script])
        read = [path.read_text().splitlines() if path.exists() else [] for path in (journal, heard)]
        return status, *read

    return run


def alerting(tmp_path, after="0"):
    path = str(tmp_path / "alerts.json")
    return ["--unit", "x.service", "--alerts", path, "--alert-after", after]


def test_a_failure_is_told_once_with_its_reason(check, engine, systemd, tmp_path, tell):
    engine.text = " 42"
    for _ in range(2):
        assert check(*alerting(tmp_path), "--expect", "Paris")[0] == 1
        status, journal, heard = tell()
    assert status == 0
    sentence = "x.service is unhealthy: generates: the prompt 'The capital of France is' "
    sentence += "was continued ' 42', without 'Paris'"
    assert [line.split(" echo ")[0] for line in journal] == [
        "--identifier=ddtree-alert --priority=alert"
    ]
    assert heard == [f"x.service|{sentence}"]


def test_what_a_program_would_not_take_is_told_again(
    check, engine, systemd, tmp_path, tell, capsys
):
    engine.text = " 42"
    check(*alerting(tmp_path), "--expect", "Paris")
    status, journal, heard = tell("exit 3")
    assert (status, len(journal), heard) == (1, 1, [])
    assert "/bin/sh ended with 3" in capsys.readouterr().err
    engine.text = " Paris"
    check(*alerting(tmp_path), "--expect", "Paris")
    status, journal, heard = tell()
    assert (status, len(journal)) == (0, 2)  # the journal has taken the alert the first time
    assert [line.split("|")[1].split(":")[0] for line in heard] == [
        "x.service is unhealthy",
        "x.service is healthy again",
    ]


def test_a_journal_that_does_not_work_keeps_no_program_from_being_told(
    check, engine, systemd, tmp_path, tell
):
    (tmp_path / "systemd-cat").write_text("#!/bin/sh\nexit 1\n")
    engine.text = " 42"
    check(*alerting(tmp_path), "--expect", "Paris")
    status, _, heard = tell()
    assert (status, len(heard)) == (0, 1)


def pending(tmp_path, *sentences):
    record = {"pending": [["alert", sentence] for sentence in sentences]}
    (tmp_path / "alerts.json").write_text(json.dumps(record))


def test_what_was_told_before_a_failure_is_not_told_again(tmp_path, tell):
    pending(tmp_path, "one", "two", "three")
    heard = tmp_path / "heard"
    script = f'echo "$1" >>{heard}; [ "$1" != "x.service two" ] || [ -e {tmp_path}/well ]'
    assert tell(script)[0] == 1
    (tmp_path / "well").touch()
    status, journal, said = tell(script)
    assert (status, len(journal)) == (0, 3)
    assert said == [f"x.service {word}" for word in ("one", "two", "two", "three")]


def test_a_sentence_is_one_line_that_a_program_can_be_given(tmp_path, tell):
    pending(tmp_path, "a\x00b\nc\udc80" + "d" * 200_000)
    status, journal, heard = tell()
    assert (status, len(journal), len(heard)) == (0, 1, 1)
    assert heard[0].startswith("x.service|x.service a b c ddd")


def test_where_nothing_can_be_kept_an_alert_is_told_once(tmp_path, tell, monkeypatch, capsys):
    pending(tmp_path, "one")

    def full(path, text):
        raise HealthError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(state, "write", full)
    assert [len(tell()[1]), len(tell()[1])] == [1, 1]
    assert "No space left" in capsys.readouterr().err


def test_a_damaged_record_of_alerts_is_told_to_nobody(tmp_path, tell):
    (tmp_path / "alerts.json").write_text('{"pending": [["alert"]]}')
    assert tell() == (0, [], [])


def test_alerts_need_the_engines_unit(tmp_path, capsys):
    assert cli.main(["--alerts", str(tmp_path / "alerts.json")]) == 64
    assert "--alerts needs --unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "localhost"],
        ["--url", "http://localhost:x"],
        ["--checks", "life"],
        ["--stall-after", "soon"],
        ["--stall-after", "-1"],
        ["--api-key-file", "/nonexistent"],
        ["--api-key-file", "{binary}"],
        ["--url", "http://[::1"],
        ["wait-free", "--port", "x"],
        ["wait-free", "--port", "65536", "--timeout", "0"],
    ],
)
def test_a_wrong_call_does_not_look_like_a_hung_engine(arguments, capsys, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    known = {"{binary}": str(tmp_path / "binary")}
    try:
        status = cli.main([known.get(word, word) for word in arguments])
    except SystemExit as error:
        status = error.code
    assert status == 64
    assert "ddtree-health" in capsys.readouterr().err


def test_a_trickling_answer_is_bounded_as_a_whole(engine):
    engine.health_delay_s = 5
    answer = server.Server(engine.url, timeout_s=0.2).get("/health")
    assert answer.silent
    assert answer.body == "/health did not answer within 0.2 s"


def test_it_runs_as_a_program_with_nothing_installed(engine):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from ddtree_health.cli import main
sys.exit(main(["--url", {engine.url!r}, "--checks", "live,ready"]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "engine is healthy"


@pytest.mark.parametrize("format_", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_has_read_enough_is_no_fault(engine, format_):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from ddtree_health.cli import main
sys.exit(main(["--url", {engine.url!r}, "--checks", "live,ready", *{format_!r}]))
"""
    read, written = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code],
            stdout=written,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(written)
    assert (done.returncode, done.stderr) == (128 + 13, "")

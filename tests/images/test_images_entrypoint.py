# SPDX-License-Identifier: Apache-2.0
"""The image's entry point without an image: settings, checks before the start, and what PID 1 does."""

import http.server
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "images/lib"), str(ROOT / "tests/health")]

from ddtree_container import ContainerError, checks, main, settings  # noqa: E402
from stub_engine import stub_engine  # noqa: E402

DEMO = ROOT / "demo"


def words(arguments, environment=None, demo=DEMO):
    return settings.serve(arguments, environment or {}, demo).command


def value(command, option):
    return command[command.index(option) + 1]


# ---- settings


def test_without_anything_the_demo_pair_is_served():
    command = words([])
    assert command[:3] == ["ddtree-vllm", "serve", str(DEMO / "target")]
    assert value(command, "--drafter") == str(DEMO / "drafter")
    assert value(command, "--budget") == "31"
    assert value(command, "--served-model-name") == "demo"
    assert value(command, "--shutdown-timeout") == "30"
    assert value(command, "--host") == "0.0.0.0"


def test_an_option_wins_over_a_variable_and_a_variable_over_the_default():
    environment = {"DDTREE_BUDGET": "7", "DDTREE_PORT": "9000", "DDTREE_ARGS": "--seed 1 --x 'a b'"}
    command = words(["--budget=15", "--max_num_seqs", "2"], environment)
    assert "--budget=15" in command
    assert "--budget" not in command
    assert value(command, "--port") == "9000"
    assert command.count("--max_num_seqs") + command.count("--max-num-seqs") == 1
    assert command[-7:] == ["--seed", "1", "--x", "a b", "--budget=15", "--max_num_seqs", "2"]


def test_a_named_model_brings_its_own_drafter_and_no_option_of_the_demo_pair():
    command = words([], {"DDTREE_MODEL": "/m", "DDTREE_DRAFTER": "/d"})
    assert command[2] == "/m"
    assert value(command, "--drafter") == "/d"
    assert not {"--dtype", "--served-model-name", "--max-model-len"} & {*command}
    command = words(["/n", "--drafter", "/e"], {"DDTREE_MODEL": "/m", "DDTREE_DRAFTER": "/d"})
    assert command[2] == "/n"
    assert [w for w in command if w == "--drafter"] == ["--drafter"]
    assert value(command, "--drafter") == "/e"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["--no-speculation"], {}), ([], {"DDTREE_SPECULATION": "off", "DDTREE_BUDGET": "7"})],
)
def test_speculation_off_leaves_no_option_of_trees(arguments, environment):
    command = words(arguments, environment)
    assert command.count("--no-speculation") == 1
    assert not {"--drafter", "--budget"} & {*command}


def test_a_static_tree_sets_its_own_budget():
    assert "--budget" not in words([], {"DDTREE_POLICY": "static", "DDTREE_STATIC_TREE": "[[0]]"})


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ([], {"DDTREE_BUGDET": "3"}, "did you mean DDTREE_BUDGET?"),
        ([], {"DDTREE_MODEL": "/m"}, "the drafter is missing: set DDTREE_DRAFTER"),
        (["/m"], {"DDTREE_DRAFTER": "/d"}, "with DDTREE_MODEL and not with /m; give --drafter"),
        ([], {"DDTREE_DRAFTER": "/d"}, "DDTREE_MODEL is not: name the drafter's target"),
        ([], {"DDTREE_SPECULATION": "no"}, "is on or off, not 'no'"),
        ([], {"DDTREE_ARGS": "--x 'a"}, "DDTREE_ARGS is not a list of words"),
        ([], {"DDTREE_ARGS": "--seed 1 --help"}, "DDTREE_ARGS asks for help"),
        (["--config", "/c.yml"], {}, "--config: this image fills in options"),
        ([], {"DDTREE_ARGS": "--config=/c.yml"}, "--config: this image fills in options"),
        (["--uds", "/run/s"], {}, "--uds: this image is asked over TCP"),
        (["--model", "/m"], {}, "--model: the model comes first; name it behind serve"),
        ([], {"DDTREE_ARGS": "--model=/m"}, "--model: the model comes first; name it behind serve"),
        (["--ssl_cert_reqs=2"], {}, "--ssl-cert-reqs 2 asks clients for a certificate"),
        ([], {"DDTREE_PORT": "tcp://10.0.0.1:80"}, "pod, or rename the Service"),
        ([], {"DDTREE_PORT_8000_TCP_ADDR": "10.0.0.1"}, "set enableServiceLinks: false"),
        ([], {"DDTREE_VLLM_SERVICE_HOST": "10.0.0.1"}, "set enableServiceLinks: false"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(arguments, environment, sentence):
    with pytest.raises(ContainerError, match=sentence.replace("?", r"\?")):
        words(arguments, environment)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--tensor-parallel", "2"],
            "--tensor-parallel can stand for --tensor-parallel-size: write",
        ),
        (["--tensor_par=2"], "--tensor-par can stand for --tensor-parallel-size: write"),
        (["-t", "2"], "-t can stand for -tp: write"),
        (["--por", "9000"], "--por can stand for --port: write"),
        (["--ud", "/s"], "--ud can stand for --uds: write"),
        (["--conf=/c.yml"], "--conf can stand for --config: write"),
        (["--mod", "/m"], "--mod can stand for --model: write"),
        (["--ssl-cert=/c"], "--ssl-cert can stand for --ssl-certfile or --ssl-cert-reqs: write"),
        (["--hel"], "--hel can stand for --help: write"),
    ],
)
def test_the_beginning_of_an_option_that_the_image_reads_is_refused(arguments, sentence):
    for given, environment in ((arguments, {}), ([], {"DDTREE_ARGS": " ".join(arguments)})):
        with pytest.raises(ContainerError, match=f"^{sentence} the option out in full$"):
            words(given, environment)


def test_no_whole_option_of_vllm_or_of_ours_counts_as_the_beginning_of_another():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ddtree_vllm.cli import _serve_parser

    parsers = (make_arg_parser(FlexibleArgumentParser()), _serve_parser())
    whole = {name for parser in parsers for name in parser._option_string_actions}
    assert {"--api-key", "--config-format", "--model-impl", "--ssl-ca-certs", "-dp"} < whole
    assert set(settings.READ) <= whole
    settings._refuse_abbreviations(sorted(whole))


def test_an_image_without_a_demo_pair_asks_for_a_model(tmp_path):
    with pytest.raises(ContainerError, match="DDTREE_MODEL is missing"):
        words([], demo=tmp_path / "none")


@pytest.mark.parametrize(
    ("call", "kind", "rest"),
    [
        ([], "serve", []),
        (["--budget", "3"], "serve", ["--budget", "3"]),
        (["serve", "/m"], "serve", ["/m"]),
        (["ddtree-vllm", "serve", "/m", "--x"], "serve", ["/m", "--x"]),
        (["doctor", "--json"], "run", ["ddtree-vllm", "doctor", "--json"]),
        (["--version"], "run", ["ddtree-vllm", "--version"]),
        (["ddtree-health", "--json"], "run", ["ddtree-health", "--json"]),
        (["--help"], "help", []),
        (["serve", "--help"], "help", []),
        (["--budget", "3", "--help"], "run", ["ddtree-vllm", "serve", "--help"]),
        (["serve", "/m", "-h"], "run", ["ddtree-vllm", "serve", "--help"]),
        (["--help=Frontend"], "run", ["vllm", "serve", "--help=Frontend"]),
    ],
)
def test_the_first_word_says_what_is_run(call, kind, rest):
    assert main.classify(call) == (kind, rest)


def test_a_word_that_is_no_command_is_refused(capsys):
    assert main.main(["Qwen/Qwen3.6-27B"]) == 2
    assert "'Qwen/Qwen3.6-27B' is no command of this image" in capsys.readouterr().err


def test_a_command_of_the_image_ends_where_nobody_reads_its_output():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'images/lib')!r})\n"
        "from ddtree_container.main import main\n"
        "main(['bash', '-c', 'yes | head -n 1; echo ${PIPESTATUS[0]}'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=30
    )
    assert (done.stdout, done.stderr) == ("y\n141\n", "")


def test_help_names_every_variable(capsys):
    assert main.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in (*settings.OPTIONS, *settings.OTHERS) if name not in said] == []


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "::", "--port", "9000"], "http://[::1]:9000"),
        (["--host=10.0.0.7"], "http://10.0.0.7:8000"),
        (["--host", "fd00::7"], "http://[fd00::7]:8000"),
        (["--ssl-keyfile", "/k", "--ssl_certfile=/c"], "https://127.0.0.1:8000"),
    ],
)
def test_the_health_check_asks_where_the_server_listens(options, url):
    assert settings.serve(options, {}, DEMO).url == url


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def tls_server(tmp_path):
    """A server whose certificate names another host and is nobody's."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [*make.split(), "-subj", "/CN=llm.example.com", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
        timeout=60,
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_the_health_check_of_a_server_with_tls_passes(tls_server, tmp_path):
    """As process 1 would be asked: its words are given instead of /proc/1/cmdline."""
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'images/lib')!r}, {str(ROOT)!r}]\n"
        "from ddtree_container import main, settings\n"
        f"words = ['/m', '--no-speculation', '--port', '{tls_server}', '--ssl-certfile', '/c']\n"
        "main._served = lambda environment: settings.serve(words, environment)\n"
        "sys.exit(main.main(['healthcheck']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_container_that_runs_something_else_has_no_health(capsys):
    assert "ddtree-entrypoint" not in Path("/proc/1/cmdline").read_text()
    assert main.main(["healthcheck"]) == 1
    assert "does not serve: its first process is" in capsys.readouterr().err


@pytest.fixture
def engine():
    with stub_engine() as stub:
        yield stub


@pytest.fixture
def health(engine, tmp_path, monkeypatch, capsys):
    """Asks as Docker does, with little patience; returns the exit code and what was said of each check."""

    def check(arguments=("--no-speculation",), later_s=0, **variables):
        state = tmp_path / "ddtree-healthcheck.json"
        if later_s:
            kept = json.loads(state.read_text())
            moments = [(kept, "asked"), (kept["clock"], "since")]
            for part, name in [(p, n) for p, n in moments if p[n] is not None]:
                part[name] -= later_s
            state.write_text(json.dumps(kept))
        port = engine.url.rpartition(":")[2]
        served = settings.serve(["/m", *arguments, "--port", port], {}, DEMO)
        monkeypatch.setattr(main, "_served", lambda environment: served)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        code = main.main(["healthcheck"])
        lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
        return code, {name: (status, because) for name, status, because in lines}

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("DDTREE_API_KEY_FILE", raising=False)
    monkeypatch.setattr(main, "GENERATE_S", 0.3)
    monkeypatch.setattr(main, "LOOK_S", 2)
    monkeypatch.syspath_prepend(str(ROOT))
    return check


def test_an_idle_engine_is_asked_for_a_completion_once_a_minute(engine, health):
    code, said = health()
    assert (code, engine.asked, said["generates"][0]) == (0, 1, "pass")
    code, said = health(later_s=30)
    assert (code, engine.asked, said["generates"][0]) == (0, 1, "pass")
    code, said = health(later_s=30)
    assert (code, engine.asked, said["live"][0]) == (0, 2, "pass")


def test_an_engine_that_hangs_while_idle_becomes_unhealthy_after_a_minute_without_an_answer(
    engine, health
):
    assert health()[0] == 0
    engine.hung = True
    code, said = health(later_s=61)
    assert (code, said["live"][0], said["generates"][0]) == (0, "unknown", "fail")
    code, said = health(later_s=61)
    assert (code, said["live"][0], said["ready"][0]) == (1, "fail", "pass")
    assert "hung: a completion is not answered and no counter moves" in said["live"][1]
    engine.hung = False
    assert health()[0] == 0


def test_a_busy_server_that_is_late_with_the_completion_stays_healthy(engine, health):
    engine.busy = True
    engine.counters["running"] = 4
    for _ in range(3):
        code, said = health(later_s=61 if engine.asked else 0)
        assert (code, said["live"][0], said["generates"][0]) == (0, "pass", "fail")
    assert engine.asked == 3


@pytest.mark.parametrize("running", [0, 1])
def test_a_server_that_drains_stays_healthy_while_it_turns_the_completion_away(
    engine, health, running
):
    assert health()[0] == 0
    engine.status, engine.counters["running"] = 503, running
    for _ in range(3):
        engine.step()
        code, said = health(later_s=61)
        assert (code, said["live"][0], said["generates"][0]) == (0, "pass", "fail")
    assert engine.asked == 4


def test_a_server_that_starts_is_not_ready_and_healthy_with_its_first_answer(engine, health):
    url = engine.url
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        engine.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, said = health()
    assert (code, said["ready"][0], said["generates"][0]) == (1, "fail", "fail")
    engine.url = url
    assert health()[0] == 0


def test_the_health_check_asks_with_the_key_of_the_file(engine, health, tmp_path):
    engine.api_key = "secret"
    (tmp_path / "key").write_text("secret\n")
    code, said = health(DDTREE_API_KEY_FILE=tmp_path / "key")
    assert (code, engine.asked, said["generates"][0]) == (0, 1, "pass")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--no-speculation", "--api-key", "secret"], {}),
        (["--no-speculation"], {"VLLM_API_KEY": "secret"}),
        (["--no-speculation"], {"DDTREE_API_KEY_FILE": "/nowhere/key"}),
    ],
)
def test_a_key_that_is_in_no_file_leaves_the_completion_out(engine, health, arguments, variables):
    engine.api_key = "secret"
    code, said = health(arguments, **variables)
    assert (code, engine.asked, [*said]) == (0, 0, ["live", "ready"])


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_a_health_check_ends_before_docker_gives_up(image):
    text = (ROOT / f"images/{image}/Containerfile").read_text()
    [limit] = re.findall(r"^HEALTHCHECK .*--timeout=(\d+)s ", text, re.MULTILINE)
    assert int(limit) > 4 * main.LOOK_S + main.GENERATE_S


@pytest.mark.parametrize("key", ["a\nb", "schl\u00fcssel"])
def test_a_key_that_no_client_could_send_is_refused(tmp_path, key):
    (tmp_path / "key").write_text(key, encoding="utf-8")
    with pytest.raises(ContainerError, match="holds no API key: write one line of ASCII"):
        main._read_api_key({"DDTREE_API_KEY_FILE": str(tmp_path / "key")})


# ---- checks


def test_folders_are_made_and_a_temporary_folder_is_found(tmp_path):
    environment = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    assert checks.prepare_folders(environment) == ""
    assert (tmp_path / "home/.cache/torchinductor").is_dir()
    assert environment["TMPDIR"] == str(tmp_path / "tmp")


@pytest.mark.parametrize("name", ["HOME", "XDG_CACHE_HOME", "TMPDIR"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    environment = {"HOME": str(tmp_path), name: "/proc/nothing"}
    with pytest.raises(ContainerError, match=f"{name}=/proc/nothing cannot be written by user"):
        checks.prepare_folders(environment)


def test_a_folder_that_takes_files_and_no_bytes_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ContainerError, match=r"cannot be written by user .*File too large"):
            checks.temporary_folder({"TMPDIR": str(tmp_path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_small_shared_memory_is_refused_for_more_than_one_rank():
    # A file system without any size.
    with pytest.raises(ContainerError, match="tensor parallelism needs 1024: --shm-size"):
        checks.check_shm(2, "/proc")
    checks.check_shm(1, "/proc")


def test_missing_shared_memory_is_a_sentence(tmp_path):
    with pytest.raises(ContainerError, match=r"cannot be looked at .No such file.*--shm-size 16g"):
        checks.check_shm(2, str(tmp_path / "none"))


# A driver that answers as it is told, for a machine without one.
STUB_CUDA = """
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
"""


@pytest.mark.parametrize(
    ("init", "count", "sentence"),
    [
        (0, 2, ""),
        (0, 0, "error 100): no GPU is in the container"),
        (100, 0, "error 100): no GPU is in the container"),
        (802, 0, "error 802): the NVSwitch fabric is not up: nvidia-fabricmanager"),
        (803, 0, "error 803): the driver's library and its kernel module differ"),
        (12345, 0, "error 12345): look at nvidia-smi"),
    ],
)
def test_cuda_is_tried_before_weights_with_a_mock_driver(
    tmp_path, monkeypatch, init, count, sentence
):
    compiler = shutil.which("cc") or shutil.which("tcc")
    assert compiler, "the stand-in of libcuda needs a C compiler: apt-get install tcc"
    source = tmp_path / "cuda.c"
    source.write_text(STUB_CUDA)
    library = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", f"-DINIT={init}", f"-DCOUNT={count}"]
    subprocess.run([compiler, *flags, source, "-o", library], check=True, timeout=60)
    said = checks.probe_cuda(str(library))
    assert sentence in said
    assert bool(said) == bool(sentence)
    # In a process of its own, as before a start.
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if sentence:
        with pytest.raises(ContainerError) as refused:
            checks.check_cuda()
        assert sentence in str(refused.value)
    else:
        checks.check_cuda()


@pytest.mark.timeout(40)
def test_cuda_that_hangs_and_cannot_be_killed_is_a_sentence_with_a_mock_driver(
    tmp_path, monkeypatch
):
    compiler = shutil.which("cc") or shutil.which("tcc")
    assert compiler, "the stand-in of libcuda needs a C compiler: apt-get install tcc"
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text("unsigned sleep(unsigned); int cuInit(unsigned f) { sleep(60); return 0; }")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    hanging = []

    def kill(process):
        hanging.append(process)

    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(checks, "CUDA_TIMEOUT_S", 1)
    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    try:
        with pytest.raises(ContainerError, match="CUDA did not initialise within 1 s"):
            checks.check_cuda()
        assert len(hanging) == 1
    finally:
        monkeypatch.undo()
        for process in hanging:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize(
    ("device", "problem", "status", "sentence"),
    [
        ("cuda", "", 0, ""),
        ("cuda", "CUDA does not initialise (error 999)", 2, "CUDA does not initialise (error 999)"),
        ("cpu", "", 2, "this image serves without a GPU"),
    ],
)
def test_a_running_container_is_asked_whether_it_has_its_gpus(
    tmp_path, monkeypatch, capfd, device, problem, status, sentence
):
    def check():
        if problem:
            raise ContainerError(problem)

    (tmp_path / "device").write_text(f"{device}\n")
    monkeypatch.setattr(main, "DEVICE", tmp_path / "device")
    monkeypatch.setattr(checks, "check_cuda", check)
    assert main.main(["cuda"]) == status
    said = capfd.readouterr().err
    assert sentence in said
    assert bool(said) == bool(sentence)


def test_without_a_driver_the_container_toolkit_is_named(monkeypatch):
    assert "NVIDIA container toolkit" in checks.probe_cuda("libcuda-that-is-nowhere.so.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1c")
    with pytest.raises(ContainerError, match="names a GPU by UUID"):
        checks.check_cuda()


# ---- PID 1

SUPERVISOR = """
import os, sys
sys.path.insert(0, {lib!r})
from ddtree_container.supervise import run
sys.exit(run([sys.executable, "-c", {child!r}], os.environ, "draining"))
"""


class Supervised:
    def __init__(self, child, **variables):
        code = SUPERVISOR.format(lib=str(ROOT / "images/lib"), child=child)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def end(self):
        try:
            _, errors = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, errors


@pytest.mark.parametrize(
    ("child", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("pass", 1),
    ],
)
def test_a_server_that_ends_by_itself_never_gives_exit_code_0(child, code):
    ended, errors = Supervised(child).end()
    assert ended == code
    assert ("ended without being asked to" in errors) == (child == "pass")


def test_a_stop_is_passed_on_and_waited_for():
    child = (
        "import signal, sys, time\n"
        "def stop(*_):\n    time.sleep(1); print('drained', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    supervised = Supervised(child)
    assert supervised.line() == "up"
    began = time.monotonic()
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.line() == "drained"
    code, errors = supervised.end()
    assert code == 0
    assert time.monotonic() - began >= 1
    assert "SIGTERM: draining" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_every_stop_reaches_the_server_as_the_one_that_it_drains_on(number):
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "print('up', flush=True)\ntime.sleep(60)\n"
    )
    supervised = Supervised(child)
    assert supervised.line() == "up"
    supervised.process.send_signal(number)
    code, errors = supervised.end()
    assert code == 0, errors
    assert f"{number.name}: draining" in errors


def test_a_stop_that_comes_before_the_start_is_not_lost():
    """Held from the checks on, and given to the server, which starts with no signal blocked."""
    code = (
        f"import os, signal, sys; sys.path.insert(0, {str(ROOT / 'images/lib')!r})\n"
        "from ddtree_container import supervise\n"
        "mask = supervise.hold_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(supervise.run(['sleep', '60'], os.environ, 'draining', mask))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 143, done.stderr
    assert "SIGTERM: draining" in done.stderr


# Tells that it was asked, and does not answer.
HANGING_CUDA = """
int creat(const char *path, unsigned mode);
unsigned sleep(unsigned seconds);
int cuInit(unsigned flags) { creat(ASKED, 0600); sleep(50); return 0; }
"""


def test_a_stop_ends_the_checks_before_the_start_with_a_mock_driver(tmp_path):
    compiler = shutil.which("cc") or shutil.which("tcc")
    assert compiler, "the stand-in of libcuda needs a C compiler: apt-get install tcc"
    asked, device = tmp_path / "asked", tmp_path / "device"
    device.write_text("cuda\n")
    source = tmp_path / "cuda.c"
    source.write_text(HANGING_CUDA.replace("ASKED", f'"{asked}"'))
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'images/lib')!r})\n"
        "from pathlib import Path\n"
        "from ddtree_container import main\n"
        f"main.DEVICE = Path({str(device)!r})\n"
        "sys.exit(main.main(['serve', '/m', '--drafter', '/d']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)},
    )
    try:
        end = time.monotonic() + 30
        while not asked.exists():
            assert process.poll() is None
            assert time.monotonic() < end, "the driver was not asked"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    assert "SIGTERM before the server was started" in errors
    assert "Traceback" not in errors


def test_other_signals_are_no_stop():
    child = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
        "print('up', flush=True)\n"
        "for _ in range(2):\n"
        "    signal.sigwait({signal.SIGHUP}); print('hup', flush=True)\n"
    )
    supervised = Supervised(child)
    assert supervised.line() == "up"
    for _ in range(2):  # it lives on after the first
        supervised.process.send_signal(signal.SIGHUP)
        assert supervised.line() == "hup"
    assert supervised.end()[0] == 1


def test_orphans_are_reaped():
    """A grandchild whose parent has ended comes here, and leaves no zombie."""
    child = (
        "import signal, subprocess, sys\n"
        "subprocess.run(['sh', '-c', 'sleep 0.2 & echo $!'])\n"
        "sys.stdout.flush()\nsignal.pause()\n"
    )
    supervised = Supervised(child)
    orphan = int(supervised.line())
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{orphan}"):
        state = Path(f"/proc/{orphan}/stat").read_text().rsplit(")", 1)[1].split()[:2]
        assert time.monotonic() < end, f"process {orphan} is still there: {state}"
        time.sleep(0.1)
    assert supervised.process.poll() is None
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.end()[0] == 143

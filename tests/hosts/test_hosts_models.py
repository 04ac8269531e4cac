# SPDX-License-Identifier: Apache-2.0
"""The role model_store on a real systemd host, from a real HTTP server in the host's network.

The server speaks the file interface of Hugging Face (tests/models/hub_server.py); the engine that is
guarded is the stand-in of test_hosts_service.py.
"""

import json
import random
import sys
import time
import uuid

import pytest
from lab_hosts import ROOT, changed

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

NODE = 1
PORT = 8765
REVISION = "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9"
TOKEN = "hf_secret_of_the_test"
WEIGHTS = "model-00001-of-00002.safetensors"
STORE = "/srv/ddtree/models"
UNIT = "ddtree-vllm@0.service"
STUB = {
    "vllm_service_venv": "/opt/stub",
    "vllm_service_install": False,
    "vllm_service_restart_delay": 1,
    "vllm_service_drain_timeout": 5,
    "vllm_service_free_timeout": 5,
    "vllm_service_checkpoints": [],
    "vllm_service_model": f"{STORE}/big",
    "vllm_service_drafter": f"{STORE}/small",
    "health_min_acceptance": 1.2,
}


class Hub:
    """The server, in a process of the lab's network."""

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        self._process = None

    def start(self, bytes_per_s=0):
        self.stop()
        (self.folder / "told.json").unlink(missing_ok=True)
        self._process = self.lab.outside_in_background(
            *(sys.executable, str(ROOT / "tests/models/hub_server.py"), str(self.folder)),
            *(str(PORT), TOKEN, str(bytes_per_s)),
        )
        self.lab.outside(
            "bash", "-c", f"for i in $(seq 100); do echo >/dev/tcp/10.78.0.1/{PORT} && exit; "
            "sleep 0.1; done; exit 1",
        )  # fmt: skip

    def stop(self):
        if self._process is not None:
            self._process.terminate()
            self._process.communicate(timeout=30)
            self._process = None

    def requests(self):
        question, told = uuid.uuid4().hex, self.folder / "told.json"
        (self.folder / "asked.new").write_text(question)
        (self.folder / "asked.new").replace(self.folder / "asked")
        end = time.monotonic() + 30
        while True:
            answered, seen = json.loads(told.read_text()) if told.exists() else ("", [])
            if answered == question:
                return seen
            assert time.monotonic() < end, "the hub does not answer"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def hub(lab, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("hub")
    generator = random.Random(request.config.getoption("--seed") or 1)
    for repo, size in (("owner/big", 3_000_000), ("owner/small", 20_000)):
        root = folder / repo / REVISION
        root.mkdir(parents=True)
        (root / "config.json").write_text("{}\n")
        (root / WEIGHTS).write_bytes(generator.randbytes(size))
    served = Hub(lab, folder)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def models(lab, hub):
    """Plays site.yml for the models of the hub; takes everything away at the end."""
    inventory = lab.inventory("cpu-demo", {"ddtree": [NODE]})
    variables = {
        **STUB,
        "model_store_endpoint": f"http://10.78.0.1:{PORT}",
        "model_store_reserve_mib": 1,
        "model_store_report_every": 2,
        "model_store_token": TOKEN,
        "model_store_models": [
            {"name": name, "repo": f"owner/{name}", "revision": REVISION}
            for name in ("big", "small")
        ],
    }

    def play(*arguments, playbook="site.yml", **more):
        return lab.play(playbook, *arguments, inventory=inventory, **{**variables, **more})

    yield play
    done = play(playbook="playbooks/uninstall.yml")
    assert done.returncode == 0, done.stdout


def test_check_mode_tells_what_would_be_fetched_and_fetches_nothing(lab, hub, models):
    hub.start()
    done = models("--tags", "model_store", "--check")
    assert done.returncode == 0, done.stdout
    assert f"Would fetch into {STORE}: big, small." in done.stdout
    assert lab.run(NODE, "ls /srv /etc/ddtree 2>/dev/null || true").strip() == "/srv:"
    # Asked whether it can be had, and for nothing else.
    assert {item["method"] for item in hub.requests() if "resolve" in item["path"]} == {"HEAD"}


def test_an_interrupted_fetch_is_resumed_and_tells_how_far_it_is(lab, hub, models):
    hub.start(bytes_per_s=150_000)
    done = models("--tags", "model_store", model_store_timeout=4)
    assert done.returncode != 0
    assert "run this again to wait for it" in done.stdout + done.stderr
    assert "big: fetching 2 of 2 files from owner/big at 6a9e13bd6fc8" in done.stdout
    # The host loses the process; nothing of the token is left by now.
    lab.run(NODE, "systemctl kill --signal=KILL ddtree-models.service")
    part = f"{STORE}/.big.partial/{WEIGHTS}.part"
    kept = int(lab.run(NODE, f"stat -c %s {part}"))
    assert 0 < kept < 3_000_000
    assert lab.try_run(NODE, "ls /run/ddtree-models").returncode != 0
    hub.start()
    assert changed(models("--tags", "model_store")) > 0
    ranges = [item["range"] for item in hub.requests() if "big" in item["path"] and item["range"]]
    assert f"bytes={kept}-" in ranges
    for name in ("big", "small"):
        assert lab.run(NODE, f"cd {STORE}/{name} && sha256sum --check --quiet SHA256SUMS") == ""


def test_a_fetch_that_has_not_begun_is_no_fetch(lab, hub, models):
    """The network is not online yet: the job waits, and its unit is inactive as after a good end."""
    hub.start()
    lab.run(NODE, f"rm -rf {STORE}/small")
    slow = '[Service]\nType=oneshot\nExecStart=/bin/sh -c "sleep $(cat /run/late)"\n'
    late = "[Unit]\nWants=slow.service\nAfter=slow.service\n"
    lab.run(
        NODE,
        f"mkdir -p /run/systemd/system/ddtree-models.service.d && cd /run/systemd/system && "
        f"printf '{slow}' >slow.service && printf '{late}' >ddtree-models.service.d/late.conf && "
        "echo 300 >/run/late && systemctl daemon-reload",
    )
    try:
        short = models("--tags", "model_store", model_store_timeout=2)
        assert short.returncode != 0
        assert "has not begun within model_store_timeout (2 s)" in short.stdout + short.stderr
        lab.run(NODE, "systemctl stop slow.service && echo 10 >/run/late")
        done = models("--tags", "model_store")
        assert changed(done) > 0
        assert "It waits for network-online.target." in done.stdout
        assert lab.run(NODE, f"cd {STORE}/small && sha256sum --check --quiet SHA256SUMS") == ""
    finally:
        lab.run(
            NODE,
            "rm -r /run/late /run/systemd/system/slow.service /run/systemd/system/ddtree-models.service.d; "
            "systemctl daemon-reload",
        )
    assert [item for item in hub.requests() if item["authorized"]]


def test_models_are_roots_and_read_only(lab, models):
    listed = lab.run(NODE, f"find {STORE} -printf '%u %m %y\\n' | sort -u").splitlines()
    assert listed == ["root 444 f", "root 755 d"]


def test_the_token_is_in_no_log_argument_or_file(lab, hub, models):
    search = f"grep -rl {TOKEN} /etc /run /srv /var/log /var/lib 2>/dev/null || true"
    assert lab.run(NODE, search) == ""
    assert TOKEN not in lab.run(NODE, "journalctl --no-pager -o export | strings || true")
    unit = lab.run(NODE, "systemctl cat ddtree-models.service")
    assert "LoadCredential=hf-token:/run/ddtree-models/hf-token" in unit
    assert lab.run(NODE, "systemd-analyze verify ddtree-models.service 2>&1") == ""
    sent = [item for item in hub.requests() if item["authorized"]]
    assert sent
    assert {item["host"] for item in sent} == {f"http://10.78.0.1:{PORT}"}


def test_a_second_run_changes_nothing_and_asks_nobody(lab, hub, models):
    hub.start()
    assert changed(models()) > 0  # the engine
    hub.start()
    assert changed(models()) == 0
    assert changed(models("--check", "--diff")) == 0
    assert not hub.requests()
    assert lab.run(NODE, f"systemctl is-active {UNIT}").strip() == "active"


def test_a_full_look_reads_everything(lab, hub, models):
    assert changed(models("--tags", "model_store", model_store_verify=True)) == 0
    told = lab.run(NODE, "ddtree-models check --full")
    assert "big: 2 files read" in told


def test_corrupted_weights_keep_the_engine_down_and_are_named(lab, hub, models):
    hub.start()
    assert models().returncode == 0  # where it is asked for by itself nothing serves yet
    hub.stop()
    weights = f"{STORE}/big/{WEIGHTS}"
    lab.run(NODE, f"printf x | dd of={weights} bs=1 seek=1000 conv=notrunc status=none")
    refused = lab.try_run(NODE, f"systemctl restart {UNIT}")
    assert refused.returncode != 0
    lab.run(NODE, f"systemctl stop {UNIT}")
    journal = lab.journal(NODE, UNIT)
    assert f"{weights} is corrupted: its SHA-256 is" in journal, journal
    hub.start()
    assert changed(models()) > 0
    fetched = [item["path"] for item in hub.requests() if "resolve" in item["path"]]
    assert fetched == [f"/owner/big/resolve/{REVISION}/{WEIGHTS}"]
    assert lab.run(NODE, f"systemctl is-active {UNIT}").strip() == "active"
    assert changed(models()) == 0


def test_a_model_that_cannot_be_had_is_refused_before_anything_changes(lab, hub, models):
    hub.start()
    absent = [{"name": "absent", "repo": "owner/absent", "revision": REVISION}]
    for more, words in (
        ({"model_store_models": absent}, "owner/absent"),
        (
            {"model_store_models": absent, "model_store_token": "wrong"},
            "with the token given (401)",
        ),
        (
            {"model_store_models": absent, "model_store_endpoint": "http://10.78.0.1:9"},
            "not reached",
        ),
    ):
        done = models("--tags", "preflight", preflight_report="", **more)
        assert done.returncode != 0
        assert words in done.stdout + done.stderr
        assert TOKEN not in done.stdout + done.stderr
        assert "changed=0" in done.stdout


def test_a_model_that_does_not_come_keeps_no_other_engine_down(lab, hub, models):
    wrong = f"{'0' * 64}  config.json"
    lab.run(
        NODE,
        f"mkdir /opt/wrong && cd /opt/wrong && echo x >config.json && echo '{wrong}' >SHA256SUMS",
    )
    wanted = [
        {"name": "wrong", "directory": "/opt/wrong"},
        *(
            {"name": name, "repo": f"owner/{name}", "revision": REVISION}
            for name in ("big", "small")
        ),
    ]
    hub.start()
    done = models("--tags", "model_store", model_store_models=wanted)
    assert done.returncode != 0
    assert "config.json is corrupted at its origin" in done.stdout + done.stderr
    lab.run(NODE, f"systemctl restart {UNIT}")
    assert lab.run(NODE, f"systemctl is-active {UNIT}").strip() == "active"
    # A failure of the last fetch is not taken for one of the next.
    lab.run(NODE, f"rm -r /opt/wrong {STORE}/small")
    assert changed(models("--tags", "model_store")) > 0


def test_a_model_fetched_anew_restarts_the_engine(lab, hub, models):
    before = lab.run(NODE, f"systemctl show --property=MainPID --value {UNIT}")
    newer = "f" * 40
    root = hub.folder / "owner/small" / newer
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text('{"newer": true}\n')
    (root / WEIGHTS).write_bytes((hub.folder / "owner/small" / REVISION / WEIGHTS).read_bytes())
    hub.start()
    wanted = [
        {"name": "big", "repo": "owner/big", "revision": REVISION},
        {"name": "small", "repo": "owner/small", "revision": newer},
    ]
    assert changed(models(model_store_models=wanted)) > 0
    assert lab.run(NODE, f"cat {STORE}/small/config.json") == '{"newer": true}\n'
    assert lab.run(NODE, f"systemctl show --property=MainPID --value {UNIT}") != before
    assert changed(models(model_store_models=wanted)) == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"model_store_models": [{"name": "a", "repo": "o/n", "revision": "main"}]},
            "model a pins no revision",
        ),
        ({"model_store_token_file": "/root/token"}, "one of them has to be empty"),
    ],
)
def test_bad_variables_are_refused_before_anything_changes(models, variables, words):
    done = models("--tags", "model_store", **variables)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
    assert "changed=0" in done.stdout


def test_a_refusal_of_the_hub_is_shown(lab, hub, models):
    hub.start()
    lab.run(NODE, f"rm -rf {STORE}/small")
    done = models("--tags", "model_store", model_store_token="wrong")
    assert done.returncode != 0
    assert "refuses owner/small with the token given (401)" in done.stdout + done.stderr
    assert changed(models("--tags", "model_store")) > 0


def test_uninstalling_leaves_nothing_of_the_store(lab, hub, models):
    # Renamed: nothing is configured under the folder's name any more.
    renamed = [
        {"name": name, "repo": f"owner/{repo}", "revision": REVISION}
        for name, repo in (("big", "big"), ("little", "small"))
    ]
    hub.start()
    assert changed(models("--tags", "model_store", model_store_models=renamed)) > 0
    assert lab.run(NODE, f"ls {STORE}").split() == ["big", "little", "small"]
    done = models(playbook="playbooks/uninstall.yml")
    assert done.returncode == 0, done.stdout
    left = lab.run(NODE, "find / -xdev -name '*ddtree*' -not -path '/opt/*' -not -path '/proc/*'")
    assert left == ""
    assert lab.run(NODE, "ls /srv") == ""
    assert changed(models(playbook="playbooks/uninstall.yml")) == 0

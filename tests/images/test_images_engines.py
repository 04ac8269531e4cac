# SPDX-License-Identifier: Apache-2.0
"""images/build.sh with a real docker and a real podman; the other tests of images have buildah.

Docker is that of a host, which reaches no network: the stage that builds the wheel stands on an image
that has what it would fetch. podman is this machine's.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile

import lab_hosts
import newer_docker
import pytest
from building import ROOT, base_image, buildah, make_image, stand_in
from test_images_build import snapshot

from ddtree_vllm import SUPPORTED_VLLM, __version__

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(2400)]

BASE, BUILDER = f"ddtree-test-vllm:{SUPPORTED_VLLM}", "ddtree-test-builder:12"
# 2020-02-02T02:02:02Z, when what snapshot() makes was committed.
COMMITTED = 1580608922
PREPARED = """
FROM {base}
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3-venv \\
 && rm -rf /var/lib/apt/lists/* /etc/apt/sources.list*
COPY wheels /prepared
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return snapshot(tmp_path_factory.mktemp("checkout") / "source", 0o022)


@pytest.fixture(scope="module")
def building_host(lab, checkout, tmp_path_factory):
    """node3: its Debian's Docker 20.10, both bases loaded, the checkout in /root/source."""
    context = tmp_path_factory.mktemp("prepared")
    [backend] = re.findall(
        r'requires = \["(hatchling==[\d.]+)"\]', (ROOT / "pyproject.toml").read_text()
    )
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--dest", str(context / "wheels")]
    pip += ["--constraint", str(ROOT / "constraints/dev.txt"), backend]
    subprocess.run(pip, check=True, timeout=300)
    (context / "Containerfile").write_text(PREPARED.format(base=base_image()))
    call = ["bud", "--layers", "--isolation", "chroot", "--format", "docker"]
    buildah(*call, "--tag", f"localhost/{BUILDER}", str(context))
    stand_in(SUPPORTED_VLLM)
    root = lab.root(3) / "root"
    shutil.copytree(context / "wheels", root / "wheels")
    for wheel in ("wheels", "no-wheels"):
        found = "/prepared" if wheel == "no-wheels" else "/wheels"
        text = f"[global]\nno-index = true\nfind-links = {found}\n"
        (root / f"{wheel}.conf").write_text(text)
    shutil.copytree(checkout, root / "source", symlinks=True)
    for number, tag in enumerate((BASE, BUILDER)):
        archive = root / f"{number}.tar"
        push = ["push", "--quiet", "--disable-compression", f"localhost/{tag}"]
        buildah(*push, f"docker-archive:{archive}:{tag}")
    return lab


def load_bases(lab):
    """Into the store that the Docker of node3 has now."""
    for number in range(2):
        lab.run(3, f"docker load --quiet --input /root/{number}.tar", 300)


def build(lab, **variables):
    """images/build.sh gpu on node3."""
    wheels = "wheels" if "WHEELS" in variables else "no-wheels"
    settings = {"BASE": BASE, "BUILDER": BUILDER, "PIP_CONF": f"/root/{wheels}.conf", **variables}
    settings.setdefault("SOURCE_DATE_EPOCH", str(COMMITTED))
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    return lab.try_run(3, f"cd /root/source && {words} bash images/build.sh gpu 2>&1", 900)


def image_of(lab, name="ddtree-vllm:gpu"):
    return json.loads(lab.run(3, f"docker image inspect {name}"))[0]


def assert_built(lab, said):
    """The image has its names, its bill of materials, its labels and its size, and starts."""
    assert re.search(rf"ddtree-vllm:gpu: \d+ MB, \d+\.\d MB over {re.escape(BASE)}; SBOM", said)
    image = image_of(lab)
    assert image["Id"] == image_of(lab, f"ddtree-vllm:{__version__}-gpu")["Id"]
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["ddtree.device"] == "cuda"
    assert image["Config"]["Healthcheck"]["Test"][-1] == "healthcheck"
    sbom = f"/root/source/build/images/ddtree-vllm-{__version__}-gpu.cdx.json"
    assert json.loads(lab.run(3, f"cat {sbom}"))["metadata"]["component"]["name"] == "ddtree-vllm"
    run = "docker run --rm --read-only --cap-drop ALL --security-opt no-new-privileges"
    assert "DDTREE_MODEL" in lab.run(3, f"{run} ddtree-vllm:gpu --help")


def test_docker_20_10_builds_the_image_without_buildx(building_host):
    lab = building_host
    load_bases(lab)
    refused = build(lab, WHEELS="/root/wheels")
    assert refused.returncode == 1
    assert "image: WHEELS needs docker's buildx: install docker-buildx-plugin" in refused.stdout
    done = build(lab)
    assert done.returncode == 0, done.stdout[-4000:]
    assert_built(lab, done.stdout)
    assert "not repeatable: files carry the time of the build" in done.stdout


def test_docker_26_builds_the_same_image_twice_in_the_containerd_store(building_host):
    """Whoever builds, and whatever was kept; an archive of it holds the name that the roles ask for."""
    lab = building_host
    newer_docker.install_engine(lab, 3)
    newer_docker.install_plugin(lab, 3, newer_docker.BUILDX)
    features = json.dumps({"features": {"containerd-snapshotter": True}})
    # Its snapshots are overlays, which cannot lie on the overlay that the host's root is.
    store = 'version = 2\nroot = "/var/lib/docker/containerd-root"\n'
    (lab.root(3) / "etc/containerd").mkdir(parents=True, exist_ok=True)
    (lab.root(3) / "etc/docker").mkdir(parents=True, exist_ok=True)
    (lab.root(3) / "etc/containerd/config.toml").write_text(store)
    (lab.root(3) / "etc/docker/daemon.json").write_text(features)
    lab.run(3, "systemctl restart containerd docker", 120)
    load_bases(lab)
    images = []
    for options in ({"WHEELS": "/root/wheels"}, {"NO_CACHE": "1", "ARCHIVE": "/root/gpu.tar"}):
        done = build(lab, **options)
        assert done.returncode == 0, done.stdout[-4000:]
        assert "not repeatable" not in done.stdout
        assert_built(lab, done.stdout)
        images.append(image_of(lab))
        assert images[-1]["Created"] == "2020-02-02T02:02:02Z"
        assert lab.run(3, "ls /root/source/build/images").split() == [
            f"ddtree-vllm-{__version__}-gpu.cdx.json"
        ]
    assert images[0]["Id"] == images[1]["Id"]
    with tarfile.open(lab.root(3) / "root/gpu.tar") as archive:
        [manifest] = json.load(archive.extractfile("manifest.json"))
    assert f"ddtree-vllm:{__version__}-gpu" in manifest["RepoTags"]
    assert lab.run(3, "cat /root/gpu.cdx.json") == lab.run(
        3, f"cat /root/source/build/images/ddtree-vllm-{__version__}-gpu.cdx.json"
    )


def test_docker_26_builds_in_its_own_store_and_says_what_makes_builds_repeatable(building_host):
    lab = building_host
    (lab.root(3) / "etc/docker/daemon.json").write_text("{}")
    lab.run(3, "systemctl restart docker", 120)
    load_bases(lab)
    done = build(lab, WHEELS="/root/wheels")
    assert done.returncode == 0, done.stdout[-4000:]
    assert_built(lab, done.stdout)
    assert "Docker gives them the commit's with buildx 0.13 and the containerd image store (\"" in (
        done.stdout
    )


@pytest.fixture
def podman(monkeypatch):
    """podman of this machine; its storage is that of buildah's tests."""
    settings = lab_hosts.work_folder() / "containers/containers.conf"
    # podman asks for higher limits than a container of CI may set; crun takes no hybrid control groups.
    settings.write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(settings))

    def run(*words):
        return subprocess.run(
            ["podman", *words], capture_output=True, text=True, check=False, timeout=300
        )

    return run


def test_podman_builds_the_image_and_an_archive_with_the_name_that_the_roles_ask_for(
    podman, checkout, tmp_path
):
    """podman calls its images localhost/..., and Docker would load them by that name."""
    base, builder = stand_in(SUPPORTED_VLLM), base_image()
    tag, archive = "ddtree-vllm:by-podman", tmp_path / "gpu.tar"
    said = make_image(
        "gpu",
        root=checkout,
        ENGINE="podman",
        BASE=base,
        BUILDER=builder,
        TAG=tag,
        ARCHIVE=str(archive),
    )
    try:
        assert re.search(rf"{tag}: \d+ MB, \d+\.\d MB over {re.escape(base)}; SBOM", said)
        assert "not repeatable" not in said
        assert "level=error" not in said
        with tarfile.open(archive) as file:
            [manifest] = json.load(file.extractfile("manifest.json"))
        assert f"docker.io/library/ddtree-vllm:{__version__}-gpu" in manifest["RepoTags"]
        assert archive.with_suffix(".cdx.json").stat().st_size > 0
        image = json.loads(podman("image", "inspect", tag).stdout)[0]
        assert image["Created"] == "2020-02-02T02:02:02Z"
        assert image["Healthcheck"]["Test"][-1] == "healthcheck"
        options = ["--rm", "--read-only", "--cap-drop", "ALL", "--no-healthcheck", "--network"]
        done = podman("run", *options, "none", "--pull", "never", tag, "--help")
        assert "DDTREE_MODEL" in done.stdout, done.stderr
    finally:
        podman("rmi", "--force", tag, f"ddtree-vllm:{__version__}-gpu")

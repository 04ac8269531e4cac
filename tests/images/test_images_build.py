# SPDX-License-Identifier: Apache-2.0
"""What is built: labels, SBOM, users and size; the GPU image on a stand-in of vLLM's own image.

The stand-in (building.stand_in) has the layout of vLLM's image: every command of the GPU image that can
run without a GPU runs on it.
"""

import json
import os
import re
import struct
import subprocess
import tarfile
from datetime import datetime

import pytest
from building import ROOT, base_image, buildah, make_image, stand_in

from ddtree_vllm import SUPPORTED_VLLM, __version__

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]


class Image:
    """A container of an image, for commands as its user would run them."""

    def __init__(self, tag):
        self.tag = tag
        self.container = buildah("from", "--pull-never", tag)

    def run(self, *words, user="10001", **variables):
        options = [o for n, v in variables.items() for o in ("--env", f"{n}={v}")]
        return subprocess.run(
            [
                "buildah",
                "run",
                "--isolation",
                "chroot",
                "--user",
                user,
                *options,
                self.container,
                "--",
                *words,
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def config(self):
        return json.loads(buildah("inspect", "--type", "image", self.tag))["Docker"]

    def size(self):
        """Bytes of all files."""
        root = buildah("mount", self.container)
        done = subprocess.run(
            ["du", "-sxb", root], check=True, capture_output=True, text=True, timeout=300
        )
        return int(done.stdout.split()[0])

    def remove(self):
        buildah("rm", self.container)


@pytest.fixture(scope="module")
def gpu():
    base = stand_in(SUPPORTED_VLLM)
    said = make_image("gpu", BASE=base, BUILDER=base_image())
    image = Image("ddtree-vllm:gpu")
    yield image, base, said
    image.remove()


def test_the_gpu_image_adds_less_than_100_mb_and_the_build_says_how_much(gpu):
    image, base, said = gpu
    below = Image(base)
    try:
        added = image.size() - below.size()
    finally:
        below.remove()
    assert 0 < added < 100e6
    [told] = re.findall(rf"ddtree-vllm:gpu: \d+ MB, (\d+\.\d) MB over {re.escape(base)};", said)
    assert abs(float(told) * 1e6 - added) < 1e6


def snapshot(folder, umask):
    """A checkout of the working tree as somebody with this umask would have it, committed long ago."""
    folder.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout
    here = b"\0".join(
        name for name in files.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists()
    )
    copy = (
        f"tar -cC {ROOT} --null --verbatim-files-from -T - | tar -xC {folder} --no-same-permissions"
    )
    subprocess.run(["sh", "-c", f"umask {umask:03o}; {copy}"], check=True, input=here, timeout=300)
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.com"}
    who |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in who.items()}
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2020-02-02T02:02:02Z")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--no-verify", "-m", "x"]):
        git = ["git", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", *words]
        subprocess.run(git, cwd=folder, check=True, env={**os.environ, **who, **dates}, timeout=300)
    return folder


def build_elsewhere(tag, folder, umask, base, **variables):
    """Builds the GPU image from a snapshot by somebody with this umask; the image and its revision."""
    checkout = snapshot(folder, umask)
    before = os.umask(umask)
    try:
        make_image("gpu", root=checkout, BASE=base, BUILDER=base_image(), TAG=tag, **variables)
    finally:
        os.umask(before)
    revision = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(revision, cwd=checkout, check=True, capture_output=True, text=True)
    return Image(tag), done.stdout.strip()


def test_the_same_commit_gives_the_same_layers_whatever_is_kept_and_whatever_the_umask(
    gpu, tmp_path
):
    """Beside kept layers of another commit, and anew from files that are their owner's alone."""
    layers = []
    for umask, options in ((0o022, {}), (0o077, {"NO_CACHE": "1"})):
        tag = f"ddtree-vllm:{umask:03o}"
        image, revision = build_elsewhere(tag, tmp_path / tag, umask, gpu[1], **options)
        try:
            started = image.run("/opt/ddtree/bin/ddtree-entrypoint", "--help")
            assert "DDTREE_MODEL" in started.stdout, started.stderr
            config = image.config()
            assert config["config"]["Labels"]["org.opencontainers.image.revision"] == revision
            assert config["created"] == "2020-02-02T02:02:02Z"
            times = image.run("find", "/opt/ddtree", "-printf", "%TY-%Tm-%Td\n").stdout.split()
            assert set(times) == {"2020-02-02"}
            layers.append(config["rootfs"]["diff_ids"])
        finally:
            image.remove()
            buildah("rmi", tag)
    assert layers[0] == layers[1]
    assert layers[0] != gpu[0].config()["rootfs"]["diff_ids"]


def test_a_gpu_image_that_adds_more_than_100_mb_is_refused(gpu, tmp_path):
    checkout = snapshot(tmp_path / "large", 0o022)
    with (checkout / "images/lib/large").open("wb") as file:
        file.truncate(100_000_000)
    variables = {
        "BASE": gpu[1],
        "BUILDER": base_image(),
        "TAG": "ddtree-vllm:big",
    }
    with pytest.raises(AssertionError, match=r"may add 100 MB to its base, and adds 10[0-3]"):
        make_image("gpu", root=checkout, **variables)
    assert "ddtree-vllm:big" not in buildah("images", "--format", "{{.Name}}:{{.Tag}}")
    buildah("tag", "ddtree-vllm:gpu", f"ddtree-vllm:{__version__}-gpu")


def test_byte_code_of_the_gpu_images_own_files_is_checked_by_no_time(gpu):
    """A base's own is its own affair."""
    code = (
        "import glob, struct\n"
        "names = [n for f in ('/opt/ddtree/lib/*', '/usr/local/lib/python3*/dist-packages/ddtree_*') "
        "for n in glob.glob(f + '/**/*.pyc', recursive=True)]\n"
        "print(len(names), [n for n in names if not struct.unpack('<4xI', open(n, 'rb').read(8))[0]])"
    )
    number, timed = gpu[0].run("python3", "-IS", "-c", code).stdout.split(" ", 1)
    assert int(number) > 50
    assert timed.strip() == "[]"


def test_the_gpu_image_is_labelled_and_starts_as_a_user(gpu):
    config = gpu[0].config()["config"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["ddtree.vllm"] == SUPPORTED_VLLM
    assert labels["ddtree.device"] == "cuda"
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/opt/ddtree/bin/ddtree-entrypoint"]
    assert not config.get("Cmd")
    assert config["Healthcheck"]["Test"][-1] == "healthcheck"
    assert "/var/cache/ddtree" in config["Volumes"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ddtree-vllm", "--version"], 0, f"ddtree-vllm {__version__}"),
        (["ddtree-topology", "--help"], 0, "usage: ddtree-topology"),
        (["ddtree-health", "--checks", "ready"], 1, "nothing listens on port 8000"),
        (["/opt/ddtree/bin/ddtree-entrypoint", "--help"], 0, "DDTREE_MODEL"),
        (["/opt/ddtree/bin/ddtree-entrypoint"], 2, "DDTREE_MODEL is missing"),
        (["/opt/ddtree/bin/ddtree-entrypoint", "healthcheck"], 1, "this container does not serve"),
        (["/opt/ddtree/bin/ddtree-entrypoint", "doctor"], 1, "no NVIDIA GPU is visible"),
        (
            ["/opt/ddtree/bin/ddtree-entrypoint", "serve", "/m", "--drafter", "/d"],
            2,
            "the container has no libcuda.so.1: run it with the NVIDIA container toolkit",
        ),
    ],
)
@pytest.mark.parametrize("user", ["10001", "12345"])
def test_commands_of_the_gpu_image_without_a_gpu(gpu, words, code, said, user):
    # A volume that one user has filled is another's to read alone.
    home = f"/tmp/{user}"
    done = gpu[0].run(*words, user=user, HOME=home, XDG_CACHE_HOME=f"{home}/cache")
    assert said in done.stdout + done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_base_with_another_vllm_is_no_base():
    with pytest.raises(AssertionError, match=r"works with vLLM 0\.32\.0 and with no other version"):
        make_image("gpu", BASE=stand_in("0.31.0"), BUILDER=base_image(), TAG="ddtree-vllm:wrong")


def test_the_bill_of_materials_names_what_is_inside(gpu):
    bom = json.loads((ROOT / f"build/images/ddtree-vllm-{__version__}-gpu.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.5")
    revision = gpu[0].config()["config"]["Labels"]["org.opencontainers.image.revision"]
    purl = f"pkg:generic/ddtree-vllm@{__version__}-gpu?revision={revision}"
    assert bom["metadata"]["component"] == {
        "type": "container",
        "bom-ref": purl,
        "name": "ddtree-vllm",
        "version": f"{__version__}-gpu",
        "purl": purl,
        "properties": [{"name": "org.opencontainers.image.revision", "value": revision}],
    }
    known = {part["purl"] for part in bom["components"]}
    assert f"pkg:pypi/ddtree-vllm@{__version__}" in known
    assert f"pkg:pypi/vllm@{SUPPORTED_VLLM}" in known
    [python] = [p for p in known if p.startswith("pkg:deb/debian/python3-minimal@")]
    assert python.endswith("?arch=amd64&distro=debian-12")
    assert len(known) == len(bom["components"]) > 80
    licences = {part["name"]: part.get("licenses") for part in bom["components"]}
    # Of the three fields that metadata may have.
    assert licences["ddtree-vllm"] == [{"expression": "Apache-2.0"}]
    assert licences["pip"] == [{"license": {"name": "MIT"}}]
    assert licences["safetensors"] == [{"license": {"name": "Apache Software License"}}]


class Archive:
    """What the layers of ours in an archive of `docker save` hold, read once."""

    def __init__(self, path):
        self.files, self.timed, self.codes = {}, [], 0
        with tarfile.open(path) as archive:
            [manifest] = json.load(archive.extractfile("manifest.json"))
            config = json.load(archive.extractfile(manifest["Config"]))
            self.labels = config["config"]["Labels"]
            self.created = datetime.fromisoformat(config["created"]).timestamp()
            # The base is the first.
            for layer in manifest["Layers"][1:]:
                with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                    for file in files:
                        self.files[file.name] = file
                        if file.name.endswith(".pyc") and file.isreg():
                            head = files.extractfile(file).read(8)
                            self.codes += 1
                            if not struct.unpack("<4xI", head)[0]:
                                self.timed.append(file.name)


@pytest.fixture(scope="module")
def read(archive):
    return Archive(archive)


def test_no_byte_code_of_the_cpu_image_is_out_of_date(read):
    """Byte code that holds its source's time is, once files have the commit's: no start could use it."""
    assert read.timed == []
    standard = [
        n for n in read.files if re.fullmatch(r"usr/lib/python3\.\d+/__pycache__/.*\.pyc", n)
    ]
    assert len(standard) > 150
    assert read.codes > 20_000


def test_every_user_may_read_the_cpu_images_files_and_none_may_write_them(read):
    ours = {n: f for n, f in read.files.items() if n.startswith("opt/ddtree/") and not f.issym()}
    assert len(ours) > 20_000
    assert [n for n, f in ours.items() if f.mode & 0o444 != 0o444 or f.mode & 0o022] == []
    assert [n for n, f in ours.items() if f.isdir() and f.mode & 0o111 != 0o111] == []


def test_files_of_the_cpu_image_carry_the_time_of_the_commit(read):
    assert {f.mtime for n, f in read.files.items() if n.startswith("opt/ddtree/")} == {read.created}


def test_the_cpu_image_is_labelled(read):
    labels = read.labels
    assert labels["org.opencontainers.image.title"] == "ddtree-vllm"
    assert labels["org.opencontainers.image.version"] == __version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["ddtree.vllm"] == SUPPORTED_VLLM
    assert labels["ddtree.device"] == "cpu"


def test_the_cpu_image_holds_the_pinned_packages(archive, read):
    """By the bill of materials that `make image` writes beside an archive."""
    file = archive.with_name(archive.name.removesuffix(".tar") + ".cdx.json")
    assert file.exists(), f"{archive} comes without its bill of materials"
    properties = json.loads(file.read_text())["metadata"]["component"]["properties"]
    revision = read.labels["org.opencontainers.image.revision"]
    assert properties == [{"name": "org.opencontainers.image.revision", "value": revision}]
    parts = {p["name"]: p["version"] for p in json.loads(file.read_text())["components"]}
    pins = re.findall(
        r"^([^#\s]+?)==(\S+)", (ROOT / "constraints/cpu.txt").read_text(), re.MULTILINE
    )
    absent = {"six"}  # of Python 3.12
    for name, version in pins:
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if plain not in absent:
            assert parts.get(plain) == version, name
    assert not {"torchaudio", "torchcodec", "pip"} & {*parts}

# SPDX-License-Identifier: Apache-2.0
"""Lists what an image holds as CycloneDX JSON. Runs inside the image, on its bare system Python.

Usage: python3 -IS - NAME:VERSION SECONDS_SINCE_EPOCH REVISION
"""

from __future__ import annotations

import glob
import json
import re
import sys
import uuid
from datetime import datetime, timezone
from email.message import Message
from email.parser import HeaderParser
from urllib.parse import quote

PYTHON_FOLDERS = (
    "/opt/ddtree/venv/lib/python3*/site-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/site-packages",
    "/usr/lib/python3/dist-packages",
)
# A licence's text in the field for its name is left to the package.
LONGEST_NAME = 100


def python_packages() -> list[dict]:
    """Every distribution of the folders that Python packages are in."""
    found = []
    for folder in PYTHON_FOLDERS:
        for path in glob.glob(f"{folder}/*.dist-info/METADATA"):
            with open(path, encoding="utf-8", errors="replace") as file:
                headers = HeaderParser().parse(file)
            name = re.sub(r"[-_.]+", "-", headers["Name"]).lower()
            version = headers["Version"]
            part = component(name, version, f"pkg:pypi/{name}@{quote(version)}")
            licences = python_licences(headers)
            if licences:
                part["licenses"] = licences
            found.append(part)
    return found


def python_licences(headers: Message) -> list[dict]:
    """The licence as metadata says it: an SPDX expression, else a name, else classifiers."""
    expression = (headers["License-Expression"] or "").strip()
    if expression:
        return [{"expression": expression}]
    name = " ".join((headers["License"] or "").split())
    if name and name.upper() != "UNKNOWN" and len(name) <= LONGEST_NAME:
        return [{"license": {"name": name}}]
    classifiers = headers.get_all("Classifier") or []
    names = [c.split(" :: ")[-1] for c in classifiers if c.startswith("License :: ")]
    return [{"license": {"name": name}} for name in names if name != "OSI Approved"]


def debian_packages() -> list[dict]:
    """Every installed package of the distribution."""
    with open("/var/lib/dpkg/status", encoding="utf-8", errors="replace") as file:
        paragraphs = file.read().split("\n\n")
    with open("/etc/os-release", encoding="utf-8") as file:
        release = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
    distribution = release["ID"].strip('"')
    # Debian 12 is debian-12, and testing has no number.
    number = release.get("VERSION_ID", "").strip('"')
    distro = f"&distro={distribution}-{number}" if number else ""
    found = []
    for paragraph in paragraphs:
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if "installed" not in fields.get("Status", "").split():
            continue
        name, version = fields["Package"], fields["Version"]
        architecture = fields["Architecture"]
        purl = f"pkg:deb/{distribution}/{quote(name)}@{quote(version)}?arch={architecture}{distro}"
        found.append(component(name, version, purl))
    return found


def component(name: str, version: str, purl: str) -> dict:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def image(name: str, version: str, revision: str) -> dict:
    """What the list is of; the revision is the image's label."""
    purl = f"pkg:generic/{quote(name)}@{quote(version)}?revision={quote(revision)}"
    return {
        **component(name, version, purl),
        "type": "container",
        "properties": [{"name": "org.opencontainers.image.revision", "value": revision}],
    }


def main() -> None:
    name, _, version = sys.argv[1].partition(":")
    time = datetime.fromtimestamp(int(sys.argv[2]), timezone.utc)  # noqa: UP017 - Python 3.10
    parts = {part["bom-ref"]: part for part in python_packages() + debian_packages()}
    components = [parts[key] for key in sorted(parts)]
    # Of the contents, so that the same image has the same list.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([sys.argv[1:], components]))
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": image(name, version, sys.argv[3]),
        },
        "components": components,
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

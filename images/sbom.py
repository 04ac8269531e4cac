# SPDX-License-Identifier: Apache-2.0
"""Lists what an image holds as CycloneDX JSON. Runs inside the image, on its bare system Python.

Usage: python3 -IS - NAME:VERSION SECONDS_SINCE_EPOCH
"""

from __future__ import annotations

import glob
import json
import re
import sys
import uuid
from datetime import datetime, timezone
from email.parser import HeaderParser
from urllib.parse import quote

PYTHON_FOLDERS = (
    "/opt/ddtree/venv/lib/python3*/site-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/site-packages",
    "/usr/lib/python3/dist-packages",
)


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
            licence = headers["License-Expression"] or ""
            if licence:
                part["licenses"] = [{"expression": licence}]
            found.append(part)
    return found


def debian_packages() -> list[dict]:
    """Every installed package of the distribution."""
    with open("/var/lib/dpkg/status", encoding="utf-8", errors="replace") as file:
        paragraphs = file.read().split("\n\n")
    with open("/etc/os-release", encoding="utf-8") as file:
        release = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
    distribution = release["ID"].strip('"')
    found = []
    for paragraph in paragraphs:
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if "installed" not in fields.get("Status", "").split():
            continue
        name, version = fields["Package"], fields["Version"]
        architecture = fields["Architecture"]
        purl = f"pkg:deb/{distribution}/{quote(name)}@{quote(version)}?arch={architecture}"
        found.append(component(name, version, purl))
    return found


def component(name: str, version: str, purl: str) -> dict:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


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
            "component": {"type": "container", "name": name, "version": version},
        },
        "components": components,
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

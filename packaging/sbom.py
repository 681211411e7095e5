#!/usr/bin/env python3
"""What is in the shipped programs: sbom.py FOLDER [PROGRAM...] writes sbom.cdx.json (CycloneDX 1.5) and
third-party-licences.txt, for PROGRAM too.

Reads `cargo metadata --locked` and the sources that cargo has unpacked. The same checkout gives the same bytes.
Python's own library is enough: the tools that write such files (cargo-about, cargo-cyclonedx) compile for minutes.
"""

import glob
import json
import os
import re
import subprocess
import sys
import time

# What packaging/install.sh installs; further ones are named by the caller.
PROGRAMS = [
    "gpushare", "gpushare-hook", "gpushare-intercept-cuda", "gpushare-intercept-nvml", "gpushare-runtime",
    "gpushare-simulator", "gpushare-simulator-cuda", "gpushare-simulator-nvml", "gpushare-supervisor",
]
TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The crates that are linked in differ by architecture; package.sh says which.
TARGETS = {"amd64": "x86_64-unknown-linux-gnu", "arm64": "aarch64-unknown-linux-gnu"}
TEXTS = re.compile(r"(licen[sc]e|copying|notice|unlicense|copyright)", re.IGNORECASE)
# glibc's own licence, where distributions keep it.
LGPL = ["/usr/share/common-licenses/LGPL-2.1", "/usr/share/licenses/glibc/COPYING.LIB"]


def fail(text):
    sys.exit(f"sbom.py: {text}")


def output(*command):
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"`{' '.join(command)}` did not work (see above): {error}")


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def shipped(metadata):
    """The packages that are linked into PROGRAMS, and for each the ids of what it needs: no tests, no build scripts."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    by_name = {package["name"]: package for package in metadata["packages"] if package["source"] is None}
    needs, queue = {}, [by_name[name]["id"] for name in PROGRAMS]
    while queue:
        one = queue.pop()
        if one not in needs:
            needs[one] = sorted(
                dependency["pkg"] for dependency in nodes[one]["deps"]
                if any(kind["kind"] is None for kind in dependency["dep_kinds"])
            )
            queue += needs[one]
    packages = {package["id"]: package for package in metadata["packages"]}
    return sorted((packages[one] for one in needs), key=lambda package: (package["name"], package["version"])), needs


def checksums():
    entry = re.compile(r'name = "([^"]+)"\nversion = "([^"]+)"\n(?:source = "[^"]+"\n)?(?:checksum = "([0-9a-f]+)")?')
    return {(name, version): sha for name, version, sha in entry.findall(read(f"{TOP}/Cargo.lock"))}


def expression(package):
    if not package["license"]:
        fail(f"{package['name']} {package['version']} names no licence in its Cargo.toml: say in sbom.py which it has")
    return re.sub(r" ?/ ?", " OR ", package["license"])


def texts(package, packages):
    """The files with the text of its licence: its own, else those of a crate of the same repository and licence."""
    alike = [
        other for other in packages
        if package["repository"] and all(other[key] == package[key] for key in ("repository", "license"))
    ]
    for one in [package, *alike]:
        folder = os.path.dirname(one["manifest_path"])
        found = [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if TEXTS.match(name)]
        if found:
            return [path for path in found if os.path.isfile(path)] or glob.glob(f"{found[0]}/*")
    if "Apache-2.0" in expression(package).split(" OR "):
        return [f"{TOP}/LICENSE"]  # that text has no line for a holder's name
    fail(f"{package['name']} {package['version']} brings no text of its licence ({package['license']})")


def component(name, version, licence, purl, sha=None, url=None):
    one = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    one["licenses"] = [{"expression": licence}]
    if sha:
        one["hashes"] = [{"alg": "SHA-256", "content": sha}]
    if url:
        one["externalReferences"] = [{"type": "vcs", "url": url}]
    return one


def compiled_in():
    """What no manifest names: Rust's own library, and glibc in the static programs."""
    version = output("rustc", "--version").split()[1]
    rust = component("rust-std", version, "MIT OR Apache-2.0", f"pkg:generic/rust-std@{version}")
    yield rust, "Apache-2.0: see LICENSE."
    # That of this machine; a cross compiler of the same distribution brings the same.
    version = output("getconf", "GNU_LIBC_VERSION").split()[1]
    text = next((read(path) for path in LGPL if os.path.exists(path)), None)
    if text is None:
        fail(f"no text of the licence of glibc, which the static programs contain: none of {', '.join(LGPL)} is there")
    note = "Linked into gpushare-runtime, gpushare-hook and gpushare-supervisor; with their sources, `make build` links another one.\n\n"
    yield component("glibc", version, "LGPL-2.1-or-later", f"pkg:generic/glibc@{version}"), note + text


def main():
    if len(sys.argv) < 2:
        fail("say the folder to write to, and perhaps further programs")
    PROGRAMS.extend(sys.argv[2:])
    target = TARGETS[os.environ.get("PACKAGE_ARCH", "amd64")]
    metadata = json.loads(output(
        os.environ.get("CARGO", "cargo"), "metadata", "--locked", "--format-version=1", "--filter-platform", target,
        "--manifest-path", f"{TOP}/Cargo.toml"))
    packages, needs = shipped(metadata)
    sums = checksums()
    components, refs, by_text = [], {}, {}
    for package in packages:
        name, version = package["name"], package["version"]
        refs[package["id"]] = purl = f"pkg:cargo/{name}@{version}"
        sha = sums.get((name, version))
        components.append(component(name, version, expression(package), purl, sha, package["repository"]))
        if package["source"] is not None:
            for path in texts(package, packages):
                by_text.setdefault(read(path).strip(), []).append(f"{name} {version} ({expression(package)})")
    for one, text in compiled_in():
        components.append(one)
        licence = one["licenses"][0]["expression"]
        by_text.setdefault(text.strip(), []).append(f"{one['name']} {one['version']} ({licence})")

    version = next(package["version"] for package in packages if package["name"] == "gpushare")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    programs = [refs[package["id"]] for package in packages if package["name"] in PROGRAMS]
    bom = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": {"type": "application", "bom-ref": "gpushare", "name": "gpushare", "version": version,
                          "licenses": [{"expression": "Apache-2.0"}]},
        },
        "components": components,
        "dependencies": [{"ref": "gpushare", "dependsOn": programs}] + [
            {"ref": refs[package["id"]], "dependsOn": [refs[need] for need in needs[package["id"]]]}
            for package in packages
        ],
    }
    with open(f"{sys.argv[1]}/sbom.cdx.json", "w", encoding="utf-8") as file:
        json.dump(bom, file, indent=1)
        file.write("\n")
    with open(f"{sys.argv[1]}/third-party-licences.txt", "w", encoding="utf-8") as file:
        file.write("Licences of what is linked into gpushare's programs. Each text stands below the names it is for.\n")
        for text, names in by_text.items():
            file.write("\n" + "=" * 80 + "\n" + "\n".join(sorted(set(names))) + "\n" + "-" * 80 + "\n" + text + "\n")


main()

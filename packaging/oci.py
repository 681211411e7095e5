#!/usr/bin/env python3
"""Packs a folder as a container image: oci.py TREE FILE NAME VERSION LEVEL. FILE is an archive of an OCI image layout,
which podman load, ctr images import, skopeo and docker load (25 and later) read. LEVEL is gzip's. The same tree gives
the same bytes: all dates are SOURCE_DATE_EPOCH, everything belongs to root, and names are sorted. No daemon is asked.
"""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import time

ROOT_PATH = "/opt/gpushare/bin:/bin"
LICENCES = "Apache-2.0 AND GPL-2.0-only AND LGPL-2.1-or-later AND GPL-3.0-or-later WITH GCC-exception-3.1"
SUMMARY = "gpushare for clusters: the installer, the node's agent, the scheduler extender and the webhook"


def plain(info, epoch):
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = epoch
    return info


def layer(tree, epoch):
    """The bytes of a tar of all that is below `tree`."""
    paths = sorted(
        os.path.relpath(os.path.join(folder, name), tree)
        for folder, folders, files in os.walk(tree) for name in folders + files
    )
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in paths:
                tar.add(os.path.join(tree, path), path, recursive=False, filter=lambda info: plain(info, epoch))
        return out.getvalue()


def compact(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main():
    tree, file, name, version, level = sys.argv[1:]
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    labels = {
        "org.opencontainers.image.created": date,
        "org.opencontainers.image.description": SUMMARY,
        "org.opencontainers.image.licenses": LICENCES,
        "org.opencontainers.image.title": "gpushare",
        "org.opencontainers.image.version": version,
    }
    blobs = {}

    def blob(kind, data, **more):
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data), **more}

    data = layer(tree, epoch)
    difference = hashlib.sha256(data).hexdigest()
    platform = {"architecture": "amd64", "os": "linux"}
    config = blob("config.v1+json", compact({
        "created": date,
        **platform,
        "config": {"Cmd": ["gpushare", "--help"], "Env": [f"PATH={ROOT_PATH}"], "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{difference}"]},
        "history": [{"created": date, "created_by": "packaging/package.sh image"}],
    }))
    layers = [blob("layer.v1.tar+gzip", gzip.compress(data, int(level), mtime=0))]
    manifest = blob("manifest.v1+json", compact({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": layers,
        "annotations": labels,
    }), platform=platform, annotations={
        # podman and skopeo read the first, containerd the second.
        "org.opencontainers.image.ref.name": f"{name}:{version}",
        "io.containerd.image.name": f"{name}:{version}",
    })
    blobs["oci-layout"] = compact({"imageLayoutVersion": "1.0.0"})
    blobs["index.json"] = compact({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    })
    with tarfile.open(file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in sorted(blobs.items()):
            info = plain(tarfile.TarInfo(path), epoch)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


main()

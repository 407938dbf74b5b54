"""Another revision of this project, loaded beside the present one."""

import importlib
import re
import subprocess
import sys
import tarfile
from functools import partial
from io import BytesIO
from pathlib import Path

import peers
from machine import git
from peers import Peer
from programs import Attention

_PACKAGE = "pallas_flash"


def resolve(revision: str) -> str:
    """The commit that a revision names.

    Raises:
      ValueError: there is no such revision, or the package is not in it.
    """
    try:
        git("rev-parse", "--git-dir")
    except (FileNotFoundError, subprocess.CalledProcessError):
        raise ValueError("there is no git repository here to find a revision in") from None
    try:
        commit = git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
        git("cat-file", "-e", f"{commit.decode().strip()}:{_PACKAGE}/__init__.py")
    except subprocess.CalledProcessError:
        raise ValueError(
            f"no revision of this project, with {_PACKAGE}/ in it, is {revision!r}"
        ) from None
    return commit.decode().strip()


def load(commit: str, folder: Path) -> Peer:
    """That revision's Triton kernels as a row; its files go to `folder`.

    A package goes by its name wherever it imports a part of itself, so that two of one name cannot
    live in one process: this one gets another name, in a folder of its own.
    """
    name = f"{_PACKAGE}_{commit[:12]}"
    with tarfile.open(fileobj=BytesIO(git("archive", commit, _PACKAGE))) as archive:
        archive.extractall(folder, filter="data")
    (folder / _PACKAGE).rename(folder / name)
    for path in (folder / name).rglob("*.py"):
        path.write_text(re.sub(rf"\b{_PACKAGE}\b", name, path.read_text()))
    sys.path.append(str(folder))

    def attention() -> Attention:
        module = importlib.import_module(name)
        return partial(module.flash_attention, implementation="triton")

    return Peer(peers.BASE, peers.traced(attention))

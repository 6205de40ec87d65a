"""Packs the folder of an extension of VS Code into a .vsix, as `code --install-extension` takes it.

In: the folder, with its production libraries installed (`npm ci --omit=dev`). Out: a zip file, the same bytes for the
same files. What goes in is said by `files` of package.json and by package-lock.json. Errors: Unpackable, in words.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

VSX = "http://schemas.microsoft.com/developer/vsx-schema/2011"
TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
CODE = "Microsoft.VisualStudio.Code"
LEFT_OUT = (".ts", ".map", ".tsbuildinfo")  # of libraries: nothing at run time reads these


class Unpackable(Exception):
    """Why a folder cannot be packed."""


def pack(folder: Path, target: Path) -> tuple[str, ...]:
    """Writes `target`; the names in it. Errors: Unpackable."""
    manifest = json.loads((folder / "package.json").read_text("utf-8"))
    files = dict(sorted({**own(folder, manifest), **libraries(folder)}.items()))
    parts = {"extension.vsixmanifest": about(manifest, "README.md" in files), "[Content_Types].xml": types([*files]),
             **{f"extension/{name}": path.read_bytes() for name, path in files.items()}}
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in parts.items():
            out.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # its date is always 1980
    return tuple(parts)


def own(folder: Path, manifest: dict[str, Any]) -> dict[str, Path]:
    """The files that package.json names, and itself."""
    found: dict[str, Path] = {}
    for name in ["package.json", *manifest["files"]]:
        path = folder / name
        if not path.exists():
            raise Unpackable(f"package.json names {name}, which is not there")
        found |= {p.relative_to(folder).as_posix(): p for p in ([path] if path.is_file() else _below(path))}
    return found


def libraries(folder: Path) -> dict[str, Path]:
    """The files of the libraries that run with it, each of the locked version."""
    locked = json.loads((folder / "package-lock.json").read_text("utf-8"))["packages"]
    found: dict[str, Path] = {}
    for name, package in locked.items():
        if not name or package.get("dev"):
            continue
        about = folder / name / "package.json"
        installed = json.loads(about.read_text("utf-8"))["version"] if about.is_file() else "not installed"
        if installed != package["version"]:
            raise Unpackable(f"{name} is {installed}, not {package['version']}: run `npm ci --omit=dev` in {folder}")
        found |= {p.relative_to(folder).as_posix(): p for p in _below(folder / name)
                  if p.suffix not in LEFT_OUT and "node_modules" not in p.relative_to(folder / name).parts}
    return found


def _below(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*")) if p.is_file())


def about(manifest: dict[str, Any], readme: bool) -> bytes:
    """extension.vsixmanifest."""
    root = xml.Element("PackageManifest", {"xmlns": VSX, "Version": "2.0.0"})
    data = xml.SubElement(root, "Metadata")
    xml.SubElement(data, "Identity", Language="en-US", Id=manifest["name"], Version=manifest["version"],
                   Publisher=manifest["publisher"])
    languages = [x["id"] for x in manifest["contributes"]["languages"]]
    for name, text in (("DisplayName", manifest["displayName"]), ("Description", manifest["description"]),
                       ("Tags", ",".join([*languages, *manifest.get("keywords", ())])),
                       ("Categories", ",".join(manifest["categories"])), ("GalleryFlags", "Public")):
        xml.SubElement(data, name).text = text
    properties = xml.SubElement(data, "Properties")
    for name, text in (("Engine", manifest["engines"]["vscode"]), ("ExtensionKind", "workspace")):
        xml.SubElement(properties, "Property", Id=f"{CODE}.{name}", Value=text)
    xml.SubElement(xml.SubElement(root, "Installation"), "InstallationTarget", Id=CODE)
    xml.SubElement(root, "Dependencies")
    assets = xml.SubElement(root, "Assets")
    xml.SubElement(assets, "Asset", Type=f"{CODE}.Manifest", Path="extension/package.json", Addressable="true")
    if readme:
        xml.SubElement(assets, "Asset", Type="Microsoft.VisualStudio.Services.Content.Details",
                       Path="extension/README.md", Addressable="true")
    return xml.tostring(root, "utf-8", xml_declaration=True)


def types(names: list[str]) -> bytes:
    """[Content_Types].xml: the zip is an Open Packaging one, in which every kind of file needs a type."""
    kinds = {".json": "application/json", ".js": "application/javascript", ".md": "text/markdown"}
    root = xml.Element("Types", {"xmlns": TYPES})
    for suffix in sorted({Path(n).suffix for n in names} - {""} | {".vsixmanifest"}):
        kind = "text/xml" if suffix == ".vsixmanifest" else kinds.get(suffix, "application/octet-stream")
        xml.SubElement(root, "Default", Extension=suffix, ContentType=kind)
    for name in names:
        if not Path(name).suffix:
            xml.SubElement(root, "Override", PartName=f"/extension/{name}", ContentType="text/plain")
    return xml.tostring(root, "utf-8", xml_declaration=True)


def main(folder: str, into: str) -> int:
    manifest = json.loads((Path(folder) / "package.json").read_text("utf-8"))
    target = Path(into) / f"{manifest['name']}-{manifest['version']}.vsix"
    try:
        names = pack(Path(folder), target)
    except Unpackable as error:
        print(f"cannot pack {folder}: {error}", file=sys.stderr)
        return 1
    print(f"wrote {target}: {len(names)} files, {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: vsix.py EXTENSION_FOLDER TARGET_FOLDER")
    sys.exit(main(*sys.argv[1:]))

"""OCI layouts made by hand, a root with a few programs, and a registry with faults, on loopback."""

import base64
import contextlib
import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from strands_env.sandbox.dockerfile import ARCHITECTURE

PROGRAMS = (
    "sh", "base64", "bash", "cat", "chmod", "dirname", "find", "id", "ls", "ln", "mkdir", "mkfifo", "mv", "rm", "sleep",
    "stat", "touch",
)  # fmt: skip
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def make_root(folder: Path) -> Path:
    """Copy a few programs of this machine to a folder, with the libraries that they need."""
    for program in PROGRAMS:
        path = Path(shutil.which(program, path="/usr/bin:/bin"))
        linked = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        needed = [Path(word) for word in linked.split() if word.startswith("/")]
        for source in (path, *needed):
            target = folder / source.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    (folder / "bin").mkdir(exist_ok=True)
    for shell in ("sh", "bash"):
        with contextlib.suppress(FileExistsError):
            (folder / "bin" / shell).symlink_to(f"/usr/bin/{shell}")
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    return folder


def member(name: str, content: bytes | None = None, **attributes) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of an archive: a file with this content, or what the attributes say."""
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    for key, value in attributes.items():
        setattr(info, key, value)
    info.size = len(content or b"")
    return info, content or b""


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an archive, as a layer has it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(data.getvalue())


def archive_of_folder(folder: Path) -> bytes:
    """Return a folder as a layer."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(folder, arcname=".")
    return gzip.compress(data.getvalue(), 1)


class Layout:
    """An OCI layout in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self._index = {"schemaVersion": 2, "manifests": []}

    def blob(self, content: bytes, kind: str) -> dict:
        """Add a blob; return its descriptor."""
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    def add(
        self, name: str, *layers: bytes, architecture: str = ARCHITECTURE, layer_type: str = LAYER, **config
    ) -> dict:
        """Add an image; return its descriptor."""
        archives = [gzip.decompress(layer) if layer.startswith(b"\x1f\x8b") else layer for layer in layers]
        digests = [f"sha256:{hashlib.sha256(archive).hexdigest()}" for archive in archives]
        described = {
            "architecture": architecture,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.blob(json.dumps(described).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(layer, layer_type) for layer in layers],
        }
        platform = {"architecture": architecture, "os": "linux"}
        found = self.blob(json.dumps(manifest).encode(), MANIFEST) | {"platform": platform}
        self._index["manifests"].append(found | {"annotations": {"org.opencontainers.image.ref.name": name}})
        (self.folder / "index.json").write_text(json.dumps(self._index))
        return found

    def path(self, descriptor: dict) -> Path:
        """Return the file of a blob."""
        return self.folder / "blobs" / descriptor["digest"].replace(":", "/")


class Registry:
    """A registry on loopback that serves a layout's images to holders of a token; `faults` spoil its next answers."""

    def __init__(self, layout: Layout, credentials: tuple[str, str] | None = None) -> None:
        self.asked: list[str] = []
        self.faults: list[str] = []
        self.leads_to = ""  # address for blobs
        self.manifest: bytes | None = None  # instead of the right one
        registry, expected = self, credentials

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args) -> None:
                pass

            def do_GET(self) -> None:
                registry.asked.append(self.path)
                if self.path.startswith("/token"):
                    given = self.headers.get("Authorization", "")
                    wanted = basic(expected) if expected else ""
                    self.answer(200 if given == wanted else 401, b'{"token": "open"}')
                elif self.headers.get("Authorization") != "Bearer open":
                    realm = f'Bearer realm="http://127.0.0.1:{registry.port}/token",service="test",scope="pull"'
                    self.answer(401, b"{}", {"WWW-Authenticate": realm})
                else:
                    self.serve()

            def serve(self) -> None:
                *_, kind, version = self.path.split("/")
                index = json.loads((layout.folder / "index.json").read_bytes())["manifests"]
                names = {each["annotations"]["org.opencontainers.image.ref.name"]: each for each in index}
                path = layout.path(names[version]) if version in names else layout.path({"digest": version})
                fault = registry.faults.pop(0) if registry.faults and kind == "blobs" else None
                if kind == "manifests" and registry.manifest is not None:
                    self.answer(200, registry.manifest)
                elif kind == "blobs" and registry.leads_to:
                    self.answer(307, b"", {"Location": registry.leads_to + self.path})
                elif fault == "unavailable":
                    self.answer(503, b"")
                elif not path.exists():
                    self.answer(404, b"{}")
                else:
                    content = path.read_bytes()
                    if fault == "changed":
                        content = content[:-1] + bytes([content[-1] ^ 1])
                    self.answer(200, content, sent=content[: len(content) // 2] if fault == "cut" else content)

            def answer(
                self, status: int, content: bytes, headers: dict | None = None, sent: bytes | None = None
            ) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content if sent is None else sent)
                if sent is not None and len(sent) < len(content):
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Registry":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def basic(credentials: tuple[str, str]) -> str:
    """Return the header of credentials."""
    return "Basic " + base64.b64encode(":".join(credentials).encode()).decode()

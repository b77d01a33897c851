"""Images from registries (https://github.com/opencontainers/distribution-spec/blob/main/spec.md)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from .world import ImageError

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
TIMEOUT_S = 60.0
PAUSE_S = 1.0  # before the second attempt, and twice as long before each further one
ATTEMPTS = 4  # the first one finds out how to authorize
MOST_BYTES = 16 << 20  # of a manifest or a configuration


@dataclass(frozen=True)
class Reference:
    """Where an image is.

    Attributes:
        host: Address of the registry.
        name: Name of the repository.
        version: Tag or digest.
    """

    host: str
    name: str
    version: str

    @classmethod
    def read(cls, text: str) -> Reference:
        """Return what a text as in `docker pull` means.

        Raises:
            ImageError: It is not a reference.
        """
        host_and_name = r"(?:([\w.-]*\.[\w.-]*(?::\d+)?|[\w.-]+:\d+|localhost)/)?([a-z0-9._/-]+)"
        found = re.fullmatch(host_and_name + r"(?::([\w.-]+))?(?:@(sha256:[0-9a-f]{64}))?", text)
        if found is None:
            raise ImageError(f"{text!r} is not the name of an image")
        host, name, tag, digest = found.groups()
        if host in (None, "docker.io"):
            host, name = "registry-1.docker.io", name if "/" in name else f"library/{name}"
        return cls(host, name, digest or tag or "latest")


class Registry:
    """A repository of a registry, which is a source of images.

    Attributes:
        where: Its address and the wanted version.
    """

    def __init__(self, where: Reference, credentials: tuple[str, str] | None, downloads: Path) -> None:
        """Ask nothing yet.

        Args:
            where: Repository and version.
            credentials: User and password, if the registry wants them.
            downloads: Folder for a layer's archive.
        """
        self.where = where
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(TIMEOUT_S), follow_redirects=True)
        scheme = "http" if where.host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
        self._address = f"{scheme}://{where.host}/v2/{where.name}"
        self._credentials = credentials
        self._downloads = downloads
        self._headers = {"Accept": ", ".join((*INDEXES, *MANIFESTS))}

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def manifest(self) -> bytes:
        """Return the manifest of the wanted version."""
        version = self.where.version
        return await self._read("manifests", version, version if ":" in version else None)

    async def content(self, descriptor: Mapping[str, Any]) -> bytes:
        """Return a manifest or a configuration."""
        kind = "manifests" if descriptor["mediaType"] in (*INDEXES, *MANIFESTS) else "blobs"
        return await self._read(kind, descriptor["digest"], descriptor["digest"])

    async def file(self, descriptor: Mapping[str, Any]) -> Path:
        """Return a file with a layer's archive, until the next call."""
        path = self._downloads / "layer"
        with open(path, "wb") as file:
            await self._get("blobs", descriptor["digest"], descriptor["digest"], file, descriptor["size"])
        return path

    async def _read(self, kind: str, version: str, digest: str | None) -> bytes:
        content = io.BytesIO()
        await self._get(kind, version, digest, content, MOST_BYTES)
        return content.getvalue()

    async def _get(self, kind: str, version: str, digest: str | None, into: BinaryIO, most: int) -> None:
        url = f"{self._address}/{kind}/{version}"
        why = ""
        pause = 0.0
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(pause)
            into.seek(0)
            into.truncate()
            try:
                async with self._client.stream("GET", url, headers=self._headers) as response:
                    if response.status_code == httpx.codes.UNAUTHORIZED:
                        self._headers["Authorization"] = await self._authorization(response)
                        why = "it refuses the credentials" if self._credentials else "it wants credentials"
                        continue
                    if response.is_client_error and response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                        raise ImageError(f"{url} answers {response.status_code} {response.reason_phrase}")
                    response.raise_for_status()
                    found = hashlib.sha256()
                    async for piece in response.aiter_bytes():
                        found.update(piece)
                        into.write(piece)
                        if into.tell() > most:
                            raise ImageError(f"{url} sends more than {most} bytes")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{type(error).__name__}: {error}"
                pause = PAUSE_S * 2**attempt
                continue
            if digest in (None, f"sha256:{found.hexdigest()}"):
                return
            why = "what it sent is not what was asked for"
        raise ImageError(f"{url}: {why}, after {ATTEMPTS} attempts")

    async def _authorization(self, response: httpx.Response) -> str:
        """Return the header that a registry wants (https://distribution.github.io/distribution/spec/auth/token/)."""
        if response.history:  # only the registry itself may say who gets the credentials
            raise ImageError(f"{response.url.host}, to which {self._address} leads, wants credentials")
        wanted = response.headers.get("WWW-Authenticate", "")
        if not wanted.lower().startswith("bearer"):
            if self._credentials is None:
                raise ImageError(f"{self._address} wants credentials")
            return "Basic " + base64.b64encode(":".join(self._credentials).encode()).decode()
        fields = dict(re.findall(r'(\w+)="([^"]*)"', wanted))
        realm = fields.pop("realm")
        if self._address.startswith("https:") and not realm.startswith("https:"):
            raise ImageError(f"{self._address} wants credentials without TLS")
        answer = await self._client.get(realm, params=fields, auth=self._credentials)
        if answer.is_error:
            raise ImageError(f"{self._address} gives no access: {answer.status_code} {answer.text[:200]}")
        found = answer.json()
        return f"Bearer {found.get('token') or found['access_token']}"

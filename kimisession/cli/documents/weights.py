"""Seeded weights."""

from typing_extensions import TypedDict


class ManifestFile(TypedDict):
    """One sealed file."""

    path: str
    bytes: int
    sha256: str
    crc32c: str


class ManifestDocument(TypedDict):
    """Sealed weights."""

    bucket: str
    model: str
    revision: str
    digest: str
    bytes: int
    files: list[ManifestFile]


class DeletedDocument(TypedDict):
    """Seeded weights that were deleted."""

    bucket: str
    objects: int

"""Wheels on the package index of pip's configuration, read in part: a vLLM wheel has hundreds of megabytes.

pip's own classes find the index, its credentials and the wheels of this platform; they are not a public interface.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zipfile import ZipFile

_LOCAL_HEADER = 512  # bytes: at least those of a file's header within a wheel


class WheelFiles:
    """The Python files of one wheel; each is fetched when it is read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._archive = ZipFile(file)
        self._names = set(self._archive.namelist())

    def read(self, path: str) -> str | None:
        """None: there is no such file."""
        if path not in self._names:
            return None
        info = self._archive.getinfo(path)
        # One request for all of it, not one for each piece that zipfile reads.
        self._file.seek(info.header_offset)
        self._file.read(info.compress_size + _LOCAL_HEADER)
        return self._archive.read(info).decode()

    def close(self) -> None:
        self._file.close()


class PackageIndex:
    def __init__(self, finder: Any, session: Any) -> None:
        self._finder, self._session = finder, session

    def releases(self, package: str) -> dict[str, Any]:
        """The wheel of each release that has one for this platform, oldest first."""
        found = [one for one in self._finder.find_all_candidates(package) if one.link.is_wheel]
        found = [one for one in found if not one.version.is_prerelease]
        return {str(one.version): one.link for one in sorted(found, key=lambda one: one.version)}

    def open(self, link: Any) -> WheelFiles:
        if link.is_file:
            return WheelFiles(Path(link.file_path).open("rb"))
        from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP

        try:
            return WheelFiles(LazyZipOverHTTP(link.url_without_fragment, self._session))
        except HTTPRangeRequestUnsupported:
            whole = TemporaryFile()  # noqa: SIM115 - it is read later
            for piece in self._session.get(link.url_without_fragment, stream=True).iter_content(1 << 20):
                whole.write(piece)
            return WheelFiles(whole)


@contextmanager
def open_index() -> Iterator[PackageIndex]:
    from pip._internal.commands.download import DownloadCommand

    logging.getLogger("pip").setLevel(logging.ERROR)  # of configured places that this machine has not
    command = DownloadCommand("download", "")
    with command.main_context():
        options, _ = command.parse_args(["--quiet", "--quiet", "--no-deps", "--only-binary", ":all:", "anything"])
        session = command.get_default_session(options)
        yield PackageIndex(command._build_package_finder(options, session), session)

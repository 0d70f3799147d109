"""Certificates made by the `openssl` program: a CA, what it issues, and what another one issues."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key."""

    cert: Path
    key: Path

    def replace(self, other: Pair) -> None:
        """Puts another pair at these paths, as a program that renews certificates does: the key first, by renaming."""
        for mine, theirs in ((self.key, other.key), (self.cert, other.cert)):
            beside = mine.with_suffix(".new")
            shutil.copyfile(theirs, beside)
            os.replace(beside, mine)


class Authority:
    """A CA with its own key. Its certificate is at `cert`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.name = name
        self.cert, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        _make_key(self._key)
        _openssl(
            *("req", "-x509", "-new", "-key", str(self._key), "-subj", f"/CN={name}", "-days", "2"),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-out", str(self.cert)),
        )

    def issue(self, name: str, host: str = "127.0.0.1", days: int = 2, uris: Sequence[str] = ()) -> Pair:
        """A certificate for a host, with these URIs beside it; with `days` below 0 it has expired."""
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        _make_key(pair.key)
        names = [f"{'IP' if host[0].isdigit() else 'DNS'}:{host}", *(f"URI:{uri}" for uri in uris)]
        extensions.write_text(f"subjectAltName={','.join(names)}\n")
        _openssl("req", "-new", "-key", str(pair.key), "-subj", f"/CN={name}", "-out", str(request))
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-days", str(days), "-extfile", str(extensions), "-out", str(pair.cert)),
        )
        return pair

    def encrypted_key(self, name: str) -> Path:
        """A key that needs a password."""
        plain, path = self.folder / f"{name}.plain", self.folder / f"{name}.key"
        _make_key(plain)
        _openssl("ec", "-in", str(plain), "-aes128", "-passout", "pass:secret", "-out", str(path))
        return path


def _make_key(path: Path) -> None:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)

"""Secrets at rest: what the tenants' webhook secrets are encrypted with."""

from __future__ import annotations

from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from app.errors import SetupError
from app.home import write_private
from app.settings import Settings


class Vault:
    """Encrypts and decrypts with one key (Fernet: AES-128-CBC with HMAC-SHA-256)."""

    def __init__(self, key: str) -> None:
        try:
            self._fernet = Fernet(key)
        except ValueError as error:
            raise SetupError(
                "EVERBATCH_SECRET_KEY is not a Fernet key: make one with "
                "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"
            ) from error

    @classmethod
    def open(cls, settings: Settings) -> Vault:
        """The vault of the settings' key, or of the key file in the home, which is made once."""
        if settings.secret_key is not None:
            return cls(settings.secret_key.get_secret_value())
        return cls(_key_file(settings.home / "secret.key"))

    def encrypt(self, secret: str) -> bytes:
        return self._fernet.encrypt(secret.encode())

    def decrypt(self, token: bytes) -> str:
        """Raises SetupError when the secret was encrypted with another key."""
        try:
            return self._fernet.decrypt(token).decode()
        except InvalidToken as error:
            raise SetupError(
                "a webhook secret was encrypted with another EVERBATCH_SECRET_KEY than this one"
            ) from error


def _key_file(path: Path) -> str:
    """The key in a 0600 file; of several processes that make it at once, the first wins."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, Fernet.generate_key().decode(), replace=False)
    return path.read_text()

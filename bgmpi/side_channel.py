"""Small messages between the ranks of a job beside MPI, for what must pass while the main threads are stuck.

MPI cannot be used for it: the main thread may be inside a collective for ever, and a second thread needs an MPI that
allows several.  Datagrams need no connection, so a thousand ranks cost rank 0 one descriptor, a rank that stopped keeps
nobody, and a lost message is as good as a late one, because all are repeated.  The port is whatever the system gives,
and its number travels through MPI.  A datagram counts only when it begins with the job's token and comes from an
address of the job's own hosts; on a single node nothing outside it can even reach the socket.

It knows neither ranks nor what is said.  It speaks IPv4 alone.  Rejected: TCP (a descriptor a rank, half-open
connections), files in the parts folder (attribute caches of shared file systems make them minutes old, and a thousand
files touched every few seconds is what their servers fear most; and a stuck file system is what one wants to hear of).
"""

from __future__ import annotations

import fcntl
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterable

Address = tuple[str, int]

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 16
_MOST_BYTES = 4096
#: ioctl of Linux: the address of an interface.
_ASK_ADDRESS = 0x8915
_NAME_BYTES = 15
_PAUSE = 0.1


def new_token() -> bytes:
    """Return what a job's datagrams begin with."""
    return secrets.token_bytes(TOKEN_BYTES)


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host's interfaces, the loopback's last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(asked.fileno(), _ASK_ADDRESS, request)
            except OSError:  # this interface has none
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return [*(one for one in found if not one.startswith("127.")), LOOPBACK]


class SideChannel:
    """One socket.  Raises OSError where the system gives none."""

    def __init__(self, token: bytes, senders: Iterable[str] = (), *, alone: bool = False) -> None:
        """token: the job's; senders: whose datagrams count, by address; alone: all ranks are on this host."""
        self._token = token
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK if alone else "", 0))
        self.port: int = self._socket.getsockname()[1]
        self.senders = {LOOPBACK, *senders}

    def send(self, message: bytes, targets: Iterable[Address]) -> None:
        """Send to every target.  What cannot be sent is lost, as it could be on its way."""
        for target in targets:
            try:
                self._socket.sendto(self._token + message, socket.MSG_DONTWAIT, target)
            except OSError:
                continue

    def receive(self, seconds: float) -> tuple[bytes, Address] | None:
        """Wait that long for a datagram; -> message and sender, None when none came or one that does not count."""
        self._socket.settimeout(max(seconds, 1e-3))
        try:
            data, sender = self._socket.recvfrom(_MOST_BYTES)
        except TimeoutError:
            return None
        except OSError:  # of the network, and it may come at once again
            time.sleep(min(seconds, _PAUSE))
            return None
        if sender[0] not in self.senders or not hmac.compare_digest(data[:TOKEN_BYTES], self._token):
            return None
        return data[TOKEN_BYTES:], sender

    def wake(self) -> None:
        """Let a `receive` of another thread return."""
        try:
            self._socket.sendto(b"", (LOOPBACK, self.port))
        except OSError:
            return

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

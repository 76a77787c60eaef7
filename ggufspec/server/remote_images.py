"""Fetches images that requests name by address, for servers that allow it: public hosts only."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from contextlib import suppress
from threading import Timer
from time import monotonic
from typing import Any
from urllib.parse import urljoin, urlsplit

from ggufspec.common.failures import closed_on_error
from ggufspec.common.image_files import MOST_BYTES, check_number
from ggufspec.engine.images import is_image
from ggufspec.errors import PromptError

_SECONDS = 10.0  # for an image, with all redirects
_N_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_BLOCK = 2**16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # contains addresses of IPv4, also private ones


def with_images(messages: list[dict[str, Any]], *, may_fetch: bool) -> list[dict[str, Any]]:
    """The messages with the files of images that have an address. Raises PromptError."""
    contents = [message.get("content") for message in messages]
    parts = [part for each in contents if isinstance(each, list) for part in each]
    images = [part for part in parts if is_image(part)]
    check_number(len(images))
    for part in images:
        url = part["image_url"] if isinstance(part["image_url"], str) else part["image_url"]["url"]
        if not url.lower().startswith(("http://", "https://")):
            continue
        if not may_fetch:
            raise PromptError(
                "an image has an address, and this server fetches none: send the file as "
                "data:image/png;base64,..., or start the server with --allow-remote-images"
            )
        part |= {"data": fetched(url), "image_url": None}
    return messages


def fetched(url: str) -> bytes:
    """The file at an address. Raises PromptError."""
    deadline = monotonic() + _SECONDS
    try:
        for _ in range(_N_REDIRECTS + 1):
            found = _response(url, deadline)
            if isinstance(found, bytes):
                return found
            url = found
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PromptError(f"an image was not fetched: {error}; send the file itself") from error
    raise PromptError("an image was not fetched: its address redirects too often")


def _response(url: str, deadline: float) -> bytes | str:
    """The file, or the address that it is at."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("its address has no host, or another scheme than http and https")
    connection = _connection(parts.scheme, parts.hostname, parts.port, deadline)
    # A host that sends a byte now and then never times out.
    end = Timer(max(deadline - monotonic(), 0), _shut, [connection.sock])
    end.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "ggufspec"})
        response = connection.getresponse()
        if response.status in _REDIRECTS:
            return urljoin(url, response.headers.get("Location", ""))
        if response.status != 200:
            raise ValueError(f"the host answered with status {response.status}")
        data = bytearray()
        while block := response.read1(_BLOCK):
            data += block
            if len(data) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES // 2**20} MiB")
        if monotonic() > deadline:
            raise TimeoutError(f"it took more than {_SECONDS:g} s")
        return bytes(data)
    finally:
        end.cancel()
        connection.close()


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _connection(
    scheme: str, host: str, port: int | None, deadline: float
) -> http.client.HTTPConnection:
    """A connection to an address of a host that is public, as is each other one that it has.

    The address is not looked up again: a second answer could be another one.
    """
    port = port or (443 if scheme == "https" else 80)
    seconds = max(deadline - monotonic(), 0.1)
    found = [each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise ValueError("its host is not a public one")
    made = http.client.HTTPConnection(host, port, timeout=seconds)
    made.sock = socket.create_connection((str(found[0]), port), timeout=seconds)
    if scheme == "https":
        with closed_on_error(made.close):
            context = ssl.create_default_context()
            made.sock = context.wrap_socket(made.sock, server_hostname=host)
    return made


def is_public(address: object) -> bool:
    """Whether an IP address belongs to the internet, and not to this machine or a local network."""
    found = ipaddress.ip_address(str(address).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped or found.sixtofour
        if found in _NAT64 or found.teredo or (mapped is not None and not mapped.is_global):
            return False
    return found.is_global and not found.is_multicast

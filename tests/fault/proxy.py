"""A TCP proxy that cuts, delays, half-closes and swallows, between a process and a server of its."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: closing sends RST, as a host that lost its memory would answer."""


class Proxy:
    """Listens on a port of its own and passes everything on to target_port, until it is told to do otherwise.

    Methods may be called from any thread and take effect at once.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._passes.set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset all connections; new ones are fine."""
        self._do(self._reset)

    def swallow(self) -> None:
        """Pass nothing on, in either direction, and say nothing of it: a partition that drops packets."""
        self._do(self._passes.clear)

    def half_close(self) -> None:
        """Tell clients that the server has said all; what they say still reaches it."""
        self._do(lambda: [writer.write_eof() for writer in self._clients if writer.can_write_eof()])

    def delay(self, seconds: float) -> None:
        """Hold every piece for so long."""
        self._do(lambda: setattr(self, "_delay_s", seconds))

    def heal(self, *, forget: bool = False) -> None:
        """Pass everything on again. With forget, what was open is reset: what was sent meanwhile never arrives."""

        def pass_on() -> None:
            self._delay_s = 0.0
            if forget:
                self._reset()
            self._passes.set()

        self._do(pass_on)

    def close(self) -> None:
        self._do(lambda: (self._reset(), self._server.close()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _do(self, change: Callable[[], object]) -> None:
        async def changed() -> None:
            change()

        asyncio.run_coroutine_threadsafe(changed(), self._loop).result(5)

    def _reset(self) -> None:
        for writer in self._writers:
            if writer.is_closing():
                continue
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            await self._passes.wait()
            from_server, server = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            client.transport.abort()
            return
        both = {client, server}
        self._writers |= both
        self._clients.add(client)
        try:
            await asyncio.gather(self._pump(reader, server), self._pump(from_server, client))
        finally:
            self._writers -= both
            self._clients.discard(client)
            for writer in both:
                writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side ends or breaks; the other then learns of it."""
        try:
            while piece := await reader.read(1 << 16):
                await self._passes.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except (OSError, RuntimeError):  # RuntimeError: write after write_eof
            writer.transport.abort()

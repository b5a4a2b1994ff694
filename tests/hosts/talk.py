"""TCP between two machines of a rig, as a program: `talk.py listen` or `talk.py call HOST`.

`listen` answers each connection's bytes with the same bytes. `call` connects, says so, and sends as
many bytes as each line on standard input says; it prints what came of it: `answered`, with the
seconds it took, `silence`, or `closed`.
"""

import socket
import sys
import threading
import time

_PORT = 5000
_PATIENCE_S = 0.5
_CHUNK_BYTES = 1 << 16


def listen() -> None:
    with socket.create_server(("", _PORT)) as server:
        print("listening", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(_CHUNK_BYTES):
            connection.sendall(data)


def call(host: str) -> None:
    with socket.create_connection((host, _PORT), timeout=30) as connection:
        print("connected", flush=True)
        for line in sys.stdin:
            print(_exchange(connection, int(line)), flush=True)


def _exchange(connection: socket.socket, num_bytes: int) -> str:
    began_s = time.monotonic()
    sender = threading.Thread(target=_send, args=(connection, num_bytes))
    sender.start()
    connection.settimeout(_PATIENCE_S)
    try:
        while num_bytes:
            got = len(connection.recv(_CHUNK_BYTES))
            if not got:
                return "closed"
            num_bytes -= got
    except TimeoutError:
        return "silence"
    except ConnectionError:
        return "closed"
    finally:
        sender.join()
    return f"answered {time.monotonic() - began_s}"


def _send(connection: socket.socket, num_bytes: int) -> None:
    try:
        connection.sendall(bytes(num_bytes))
    except OSError:  # the one that receives finds out by itself
        return


if __name__ == "__main__":
    listen() if sys.argv[1] == "listen" else call(sys.argv[2])

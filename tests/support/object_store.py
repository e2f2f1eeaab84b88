"""A real S3 server in the test's process, behind a proxy that fails, waits or cuts connections on request."""

import http.client
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moe_dualpipe import messages
from moe_dualpipe.data.stores import copies, store
from moe_dualpipe.data.stores import local_copies as stand_in

BUCKET = "bucket"
ACCESS = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    size: int
    deleted: tuple[str, ...] = ()

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.path


Fault = Callable[[Request], Any]
"""Returns a status to answer with, "cut" to close the connection in the middle of the answer, "hang up" to close it
before the request is passed on, or None. It may also wait."""


@dataclass
class ObjectStore:
    """requests: all that came. fault: what is asked about each of them. bytes_read: the content that was sent back."""

    endpoint: str
    server: str
    requests: list[Request] = field(default_factory=list)
    fault: Fault = lambda _: None
    bytes_read: int = 0
    _client: Any = None

    def client(self) -> Any:
        """A client that does not pass through the proxy."""
        if self._client is None:
            import boto3

            self._client = boto3.client("s3", endpoint_url=self.server)
        return self._client

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def content(self, key: str) -> bytes:
        return self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=key, Body=data)

    def put_folder(self, folder: Path, key: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(folder)}", path.read_bytes())

    def written(self) -> list[str]:
        """The names of the files that were written, in this order, without parts of files."""
        return [request.path.rpartition("/")[2] for request in self.requests if request.method == "PUT"]

    def reset_faults(self) -> None:
        self.fault, self.bytes_read = lambda _: None, 0
        self.requests.clear()

    def reset(self) -> None:
        self.fault = lambda _: None
        client = self.client()
        for name in self.names():
            client.delete_object(Bucket=BUCKET, Key=name)
        for one in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
            client.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])
        forget()
        self.reset_faults()


def _handler(served: ObjectStore, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, wbufsize = "HTTP/1.1", -1  # a packet for each answer, not one for each header

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            deleted = re.findall("<Key>(.*?)</Key>", body.decode()) if self.path.endswith("?delete") else []
            request = Request(self.command, self.path, len(body), tuple(deleted))
            served.requests.append(request)
            fault = served.fault(request)
            if fault == "hang up":
                self.close_connection = True
                return
            if isinstance(fault, int):
                head = self.command == "HEAD"
                self._answer(
                    fault,
                    {},
                    b"" if head else f"<Error><Code>{fault}</Code><Message>injected</Message></Error>".encode(),
                )
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
            if not self.headers.get("Authorization", "").startswith("AWS4"):  # Google's; no signature is checked
                headers["authorization"] = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            data, got = answer.read(), dict(answer.getheaders())
            served.bytes_read += len(data) * (self.command == "GET" and "?" not in self.path)
            connection.close()
            if self.command == "HEAD":
                self._answer(answer.status, got, b"", int(got.get("Content-Length", 0)))
            elif fault == "cut":
                self._answer(answer.status, got, data[: len(data) // 2], len(data))
                self.close_connection = True
            else:
                self._answer(answer.status, got, data)

        def _answer(self, status: int, headers: dict[str, str], data: bytes, length: int | None = None) -> None:
            with suppress(OSError):
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server with an empty bucket. Until the end, s3:// is this server, for this process and its children."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    tempfile.gettempdir()  # that of this process stays as it is
    forkserver.ensure_running()  # nor do later processes get the folder, which does not last
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, ACCESS | {"TMPDIR": folder}):
        server.start()
        _, port = server.get_host_and_port()
        found = ObjectStore("", f"http://127.0.0.1:{port}")
        proxy = _Proxy(("127.0.0.1", 0), _handler(found, port))
        found.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        found.client().create_bucket(Bucket=BUCKET)
        try:
            with (
                mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": found.endpoint}),
                mock.patch.object(stand_in, "tempfile", SimpleNamespace(gettempdir=lambda: folder)),
            ):
                forget()
                yield found
        finally:
            forget()
            proxy.shutdown()
            proxy.server_close()
            server.stop()


def access(served: ObjectStore) -> dict[str, str]:
    """What a process that was started earlier needs in its environment to reach the store."""
    return {**ACCESS, "AWS_ENDPOINT_URL": served.endpoint, "TMPDIR": os.environ["TMPDIR"]}


def in_environment(rank: int, environment: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(rank, *arguments)` in a process of its own, for `run_ranks`."""
    os.environ.update(environment)
    tempfile.tempdir = None
    return function(rank, *arguments)


def forget() -> None:
    """What this process knows of stores. The next call connects anew, with the access that the environment gives."""
    store._store.cache_clear()
    stand_in._STANDS_FOR.clear()
    copies._opened.clear()
    messages._SHOWN_AS.clear()


def first(count: int, fault: Any, wanted: Callable[[Request], bool] = lambda _: True) -> Fault:
    """A fault for only the first `count` requests that are wanted."""
    left = [count]

    def decide(request: Request) -> Any:
        if wanted(request) and left[0] > 0:
            left[0] -= 1
            return fault
        return None

    return decide

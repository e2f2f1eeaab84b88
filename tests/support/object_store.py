"""A real S3 server in the test's process that fails, waits or cuts connections on request."""

import io
import itertools
import logging
import os
import re
import socket
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from moe_dualpipe import messages
from moe_dualpipe.data.stores import local_copies as stand_in
from moe_dualpipe.data.stores import store

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


class ObjectStore:
    """requests: all that came. fault: what is asked about each of them. bytes_read: the content that was sent back.

    A WSGI application around that of the server. The client of a test passes through it unseen.
    """

    def __init__(self, app: Any):
        self._app, self.endpoint = app, ""
        self.requests: list[Request] = []
        self.reset_faults()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if "Boto3" in environ.get("HTTP_USER_AGENT", ""):
            return self._app(environ, start_response)
        method, path = environ["REQUEST_METHOD"], environ["RAW_URI"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        deleted = re.findall("<Key>(.*?)</Key>", body.decode()) if path.endswith("?delete") else []
        request = Request(method, path, len(body), tuple(deleted))
        self.requests.append(request)
        fault = self.fault(request)
        if isinstance(fault, int):
            error = Response(f"<Error><Code>{fault}</Code><Message>injected</Message></Error>", fault)
            return error(environ, start_response)
        if fault == "hang up":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):  # Google's; no signature is checked
            environ["HTTP_AUTHORIZATION"] = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"
        answer = Response.from_app(self._app, environ, buffered=True)
        data = answer.get_data()
        if method == "HEAD":
            return answer(environ, start_response)
        self.bytes_read += len(data) * (method == "GET" and "?" not in path)
        answer.content_length = len(data)
        start_response(answer.status, answer.headers.to_wsgi_list())
        return [data[: len(data) // 2] if fault == "cut" else data]

    @cached_property
    def client(self) -> Any:
        """A client whose requests are not counted and have no faults."""
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def content(self, key: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def put_folder(self, folder: Path, key: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(folder)}", path.read_bytes())

    def written(self) -> list[str]:
        """The names of the files that were written, in this order, without parts of files."""
        return [request.path.rpartition("/")[2] for request in self.requests if request.method == "PUT"]

    def reset_faults(self) -> None:
        self.fault: Fault = lambda _: None
        self.bytes_read = 0
        self.requests.clear()

    def reset(self) -> None:
        """An empty bucket, and a process that knows nothing of it."""
        self.reset_faults()
        urllib.request.urlopen(f"{self.endpoint}/moto-api/reset", b"").close()
        self.client.create_bucket(Bucket=BUCKET)
        forget()
        self.requests.clear()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server with an empty bucket. Until the end, s3:// is this server, for this process and its children."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    found = ObjectStore(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, found, threaded=True, request_handler=MotoRequestHandler)
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tempfile.gettempdir()  # that of this process stays as it is
    forkserver.ensure_running()  # nor do later processes get the folder, which does not last
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, ACCESS | {"TMPDIR": folder, "AWS_ENDPOINT_URL": found.endpoint}),
            mock.patch.object(stand_in, "tempfile", SimpleNamespace(gettempdir=lambda: folder)),
        ):
            found.reset()
            yield found
    finally:
        forget()
        server.shutdown()
        server.server_close()


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
    stand_in._opened.clear()
    messages._SHOWN_AS.clear()


def first(count: int, fault: Any, wanted: Callable[[Request], bool] = lambda _: True) -> Fault:
    """A fault for only the first `count` requests that are wanted."""
    left = itertools.repeat(fault, count)
    return lambda request: next(left, None) if wanted(request) else None

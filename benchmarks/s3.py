"""An S3 of this machine (moto) that keeps a list of the requests that it gets."""

from __future__ import annotations

import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from report import Report

_BUCKET = "benchmark"


class S3(NamedTuple):
    """Where it is, and the paths that it has been asked for."""

    url: str
    requests: list[str]

    def env(self) -> dict[str, str]:
        """Return the environment of a flow that keeps everything there, apart from what other flows keep."""
        return {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "METAFLOW_S3_ENDPOINT_URL": self.url,
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{_BUCKET}/{uuid.uuid4().hex}",
            "METAFLOW_S3_WORKER_COUNT": "2",  # Metaflow's default of 64 processes is for large machines
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def s3_if_there(report: Report) -> Iterator[S3 | None]:
    """Start it if what it needs is installed, and stop it at the end; what it holds is in memory."""
    if any(find_spec(name) is None for name in ("moto", "flask", "boto3")):
        report.note("what needs S3: skipped, without pip install -e '.[bench]'")
        yield None
        return
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: Any) -> None:
            pass

    requests: list[str] = []
    moto = DomainDispatcherApplication(create_backend_app)

    def counting(environ: dict[str, Any], start_response: Any) -> Any:
        requests.append(environ["PATH_INFO"])
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, counting, threaded=True, request_handler=Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        no_proxy.open(urllib.request.Request(f"{url}/{_BUCKET}", method="PUT"), timeout=30).close()
        yield S3(url, requests)
    finally:
        server.shutdown()
        server.server_close()

"""A server on this machine in place of a hub of data sets."""

import contextlib
import hashlib
import http.server
import json
import threading


@contextlib.contextmanager
def serving(served: dict[str, bytes] | None = None):
    """(address, dictionary) of a server of what is in the dictionary: path -> bytes. A hub's
    answers have its headers."""
    served = {} if served is None else served

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = served.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            body = body or b""
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", "c" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", served
        httpd.shutdown()


def put(served: dict[str, bytes], name: str, files: dict[str, bytes]) -> None:
    """Make the server one of the hub with a data set of these files."""
    listed = [dict(type="file", path=n, size=len(b), oid="0" * 40) for n, b in files.items()]
    served[f"/api/datasets/{name}/tree/main"] = json.dumps(listed).encode()
    for file, body in files.items():
        served[f"/datasets/{name}/resolve/main/{file}"] = body


def asked_at(url: str, cache, monkeypatch) -> None:
    """The hub's client asks the server there, and keeps what it fetches in the folder `cache`."""
    from huggingface_hub import constants

    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    now = dict(ENDPOINT=url, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE=False)
    for name, value in (now | dict(HUGGINGFACE_CO_URL_TEMPLATE=template)).items():
        monkeypatch.setattr(constants, name, value)

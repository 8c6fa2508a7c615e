"""A stand-in for Google Cloud Storage on this machine, to which TensorFlow's own client talks.

TensorFlow knows the service by the names www.googleapis.com and storage.googleapis.com. So the
server here is a proxy, too: for a connection to one of these it answers itself, with a certificate
of its own. ``FakeGcs.environment`` makes another process use it; TensorFlow reads these variables
when it first needs the service.

What it knows of https://cloud.google.com/storage/docs/json_api is what TensorFlow asks for. It
answers as to an account with the role Storage Object Admin, which may not look at buckets
themselves.
"""

import dataclasses
import http
import http.server
import json
import re
import ssl
import subprocess
import threading
import time
import urllib.parse

_REASONS = {
    401: "Invalid Credentials",
    403: "the account does not have storage.objects.get access",
    503: "Service Unavailable",
}
# Real pages have 1000 names: with so few there are several.
_PAGE = 5
_METADATA = re.compile(r"/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_REWRITE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)")


@dataclasses.dataclass
class StoredObject:
    """What lies under a name."""

    content: bytes
    generation: int
    updated: float


class FakeGcs:
    """The service, in threads of this process, until the context ends.

    Args:
      folder: for the certificate; must exist.

    Attributes:
      buckets: by name, the objects in each by their names.
      refused: the status with which all is answered, 401, 403 or 503, by the bucket's name.
      requests: of each so far, the method, the host and the path with its query.
    """

    token = "a-token-of-the-fake"

    def __init__(self, folder):
        self.buckets = {}
        self.refused = {}
        self.requests = []
        self._generation = 0
        self._uploads = {}
        self._lock = threading.Lock()
        self._certificate = folder / "certificate.pem"
        key = folder / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=fake"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-addext", "subjectAltName=DNS:*.googleapis.com"),
                *("-keyout", str(key), "-out", str(self._certificate)),
            ],
            check=True,
            capture_output=True,
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self._certificate, key)
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self):
        """Variables of a process whose TensorFlow is to use this service, and to give up soon."""
        proxy = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {
            "https_proxy": proxy,
            "HTTPS_PROXY": proxy,
            "no_proxy": "localhost,127.0.0.1",
            "CURL_CA_BUNDLE": str(self._certificate),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": self.token,
            "GCS_RETRY_CONFIG_MAX_RETRIES": "2",
            "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "1000",
            # 64 MB are allocated for each file that is read otherwise.
            "GCS_READAHEAD_BUFFER_SIZE_BYTES": "65536",
        }

    def put(self, bucket, name, content):
        """Stores an object."""
        with self._lock:
            self._generation += 1
            self.buckets[bucket][name] = StoredObject(content, self._generation, time.time())

    def put_folder(self, folder, bucket, name):
        """Stores the files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(bucket, f"{name}/{path.relative_to(folder)}", path.read_bytes())

    def files(self, bucket, folder):
        """Returns the contents of a folder's files by their names in it."""
        with self._lock:
            return {
                name[len(folder) + 1 :]: item.content
                for name, item in sorted(self.buckets[bucket].items())
                if name.startswith(f"{folder}/") and not name.endswith("/")
            }

    def begin_upload(self, bucket, name):
        """Returns the number of a resumable upload."""
        with self._lock:
            self._uploads[str(len(self._uploads))] = [bucket, name, b""]
            return len(self._uploads) - 1

    def go_on_with_upload(self, number, start, content, total):
        """Takes a part of an upload, and stores the object if it is the last."""
        upload = self._uploads[number]
        assert start == len(upload[2]), "a part is missing"
        upload[2] += content
        if len(upload[2]) == total:
            self.put(*upload)


class _RefusedError(Exception):
    """An answer other than success."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # An answer is sent in two parts.
    service = None
    _host = ""

    def log_message(self, *arguments):
        pass

    def do_CONNECT(self):
        self.send_response(200)
        self.end_headers()
        self._host = self.path.partition(":")[0]
        try:
            self.connection = self.service._context.wrap_socket(self.connection, server_side=True)
        except (ssl.SSLError, OSError):
            self.close_connection = True
            return
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)
        self.close_connection = False

    def do_GET(self):
        self._answer(self._get)

    def do_POST(self):
        self._answer(self._post)

    def do_PUT(self):
        self._answer(self._put)

    def do_DELETE(self):
        self._answer(self._delete)

    def _answer(self, method):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body = self._body()
        self.service.requests.append((self.command, self._host, self.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {self.service.token}":
                raise _RefusedError(401, "Invalid Credentials")
            status, headers, content = method(url.path, query, body)
        except _RefusedError as refused:
            status, headers = refused.status, {}
            content = {"error": {"code": status, "message": str(refused)}}
        if not isinstance(content, bytes):
            content = json.dumps(content, indent=1).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _get(self, path, query, body):
        if self._host == "storage.googleapis.com":
            bucket, _, name = path[1:].partition("/")
            return self._content(self._find(bucket, name).content)
        if path.endswith("/storageLayout"):
            return 200, {}, {"hierarchicalNamespace": {"enabled": False}}
        bucket, name = _METADATA.fullmatch(path).groups()
        if name is not None:
            item = self._find(bucket, name)
            updated = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(item.updated))
            size, generation = str(len(item.content)), str(item.generation)
            return 200, {}, {"size": size, "generation": generation, "updated": updated}
        objects = self._objects(bucket)
        if not path.endswith("/o"):
            raise _RefusedError(403, "the account does not have storage.buckets.get access")
        return 200, {}, _page(sorted(objects), query)

    def _content(self, content):
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "bytes=0-"))
        if not match:
            return 200, {}, content
        first, last = map(int, match.groups())
        if first >= len(content):
            raise _RefusedError(http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "nothing there")
        return 206, {}, content[first : last + 1]

    def _post(self, path, query, body):
        rewrite = _REWRITE.fullmatch(path)
        if rewrite:
            bucket, name, target_bucket, target = rewrite.groups()
            self._objects(target_bucket)
            content = self._find(bucket, name).content
            self.service.put(target_bucket, urllib.parse.unquote(target), content)
            return 200, {}, {"done": True}
        bucket = _UPLOAD.fullmatch(path)[1]
        objects = self._objects(bucket)
        if query["uploadType"] == "resumable":
            number = self.service.begin_upload(bucket, query["name"])
            location = (
                f"https://www.googleapis.com/upload/storage/v1/b/{bucket}/o?upload_id={number}"
            )
            return 200, {"Location": location}, {}
        if query.get("ifGenerationMatch") == "0" and query["name"] in objects:
            raise _RefusedError(412, "it exists")
        self.service.put(bucket, query["name"], body)
        return 200, {}, {}

    def _put(self, path, query, body):
        given = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", self.headers.get("Content-Range", ""))
        start, total = map(int, given.groups()) if given else (0, 0)
        self.service.go_on_with_upload(query["upload_id"], start, body, total)
        return 200, {}, {}

    def _delete(self, path, query, body):
        bucket, name = _METADATA.fullmatch(path).groups()
        self._find(bucket, name)
        with self.service._lock:
            del self.service.buckets[bucket][urllib.parse.unquote(name)]
        return 204, {}, b""

    def _objects(self, bucket):
        if bucket in self.service.refused:
            status = self.service.refused[bucket]
            raise _RefusedError(status, _REASONS[status])
        if bucket not in self.service.buckets:
            raise _RefusedError(404, "The specified bucket does not exist.")
        return self.service.buckets[bucket]

    def _find(self, bucket, name):
        name = urllib.parse.unquote(name)
        if name not in self._objects(bucket):
            raise _RefusedError(404, f"No such object: {bucket}/{name}")
        return self.service.buckets[bucket][name]


def _page(names, query):
    """Returns a page of a list: names that begin with a prefix, and folders apart from them."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items = []
    for name in (name for name in names if name.startswith(prefix)):
        rest = name[len(prefix) :]
        folder = delimiter and delimiter in rest
        entry = prefix + rest.partition(delimiter)[0] + delimiter if folder else name
        if (entry, bool(folder)) not in items:
            items.append((entry, bool(folder)))
    start = int(query.get("pageToken", 0))
    end = start + min(_PAGE, int(query.get("maxResults", _PAGE)))
    page = {
        "items": [{"name": entry} for entry, folder in items[start:end] if not folder],
        "prefixes": [entry for entry, folder in items[start:end] if folder],
    }
    page = {key: value for key, value in page.items() if value}
    return {**page, "nextPageToken": str(end)} if end < len(items) else page

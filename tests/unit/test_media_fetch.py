"""Fetching, against real servers on the loopback interface and a resolver under the test's control."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kit import encoded, error_of
from mmrender.errors import MediaBlockedError, MediaError, MediaFetchError, MediaLimitError
from mmrender.media import fetch as fetching
from mmrender.media.fetch import fetch, printable_url
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.resolve import source_fingerprint

WHERE = "messages[0].content[0]"
OWN_CONTEXT = fetching._tls_context
CERTIFICATE = Path(__file__).parent.parent / "data" / "tls" / "images.test.pem"
LOOPBACK = MediaPolicy(allow_networks=("127.0.0.1",), connect_timeout=5, read_timeout=5, total_timeout=20)
SLOW = replace(LOOPBACK, read_timeout=0.2)
PNG = encoded(Image.new("RGB", (5, 4), "green"))


class Site(ThreadingHTTPServer):
    """A server whose answers the test sets, and which keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.released = threading.Event()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up early is what these tests are about."""

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        self.server.answers[self.path.partition("?")[0]](self)

    def log_message(self, *_: object) -> None:
        pass


def body(data: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(data)), **headers}.items():
            if value:
                handler.send_header(name.replace("_", "-").title(), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def raw(data: bytes, *, wait: threading.Event | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(data)
        handler.wfile.flush()
        if wait is not None:
            wait.wait(30)
        handler.close_connection = True

    return answer


def redirect(location: str, status: int = 302) -> Callable[[BaseHTTPRequestHandler], None]:
    return body(b"", status, location=location)


@contextlib.contextmanager
def serving(site: Site) -> Iterator[Site]:
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        site.released.set()
        site.shutdown()
        thread.join()
        site.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site()) as running:
        running.answers["/a.png"] = body(PNG)
        yield running


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A resolver that knows what the test writes into this table, addresses included."""
    table: dict[str, list[str]] = {}

    def resolve(host: str, port: int) -> list[str]:
        if host not in table:
            raise socket.gaierror(-2, "Name or service not known")
        return table[host]

    monkeypatch.setattr(fetching, "resolve", resolve)
    return table


def said(caught: pytest.ExceptionInfo[Exception], port: int) -> str:
    """Return an error without the port of its server."""
    return str(caught.value).replace(f":{port}", ":PORT")


def test_plain_fetch_of_each_form_of_body_without_proxies(site, monkeypatch):
    loaded = load_image(site.url("/a.png?size=1&name=ü b"), LOOPBACK)
    assert loaded.array[0, 0].tolist() == [0, 128, 0]
    path, headers = site.asked[0]
    assert path == "/a.png?size=1&name=%C3%BC%20b"
    assert headers["Host"] == f"127.0.0.1:{site.server_port}"
    assert headers["Accept-Encoding"] == "identity"
    assert headers["User-Agent"].startswith("mmrender/")
    assert "Authorization" not in headers
    site.answers["/unstated"] = body(PNG, content_length="")
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (PNG[:7], PNG[7:])) + b"0\r\n\r\n"
    site.answers["/chunked"] = body(chunked, content_length="", transfer_encoding="chunked")
    assert fetch(site.url("/unstated"), LOOPBACK) == PNG
    Handler.protocol_version, before = "HTTP/1.1", Handler.protocol_version
    try:
        assert fetch(site.url("/chunked"), LOOPBACK) == PNG
    finally:
        Handler.protocol_version = before
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch(site.url(), LOOPBACK) == PNG


def test_loopback_is_blocked_by_default(site, sentence):
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "user:pass@127.0.0.1"):
        with pytest.raises(MediaBlockedError):
            load_image(site.url(host=host))
    with pytest.raises(MediaBlockedError) as caught:
        load_image(site.url("/a.png?sig=SECRET#f", "me:SECRET@127.0.0.1"), where=WHERE)
    assert said(caught, site.server_port) == sentence
    assert site.asked == []


def test_name_that_resolves_to_a_private_address(names):
    names["inside.test"] = ["10.0.0.7"]
    names["mapped.test"] = ["::ffff:169.254.169.254"]
    names["nowhere.test"] = []
    for host, address in [("inside.test", "10.0.0.7"), ("mapped.test", "::ffff:169.254.169.254")]:
        with pytest.raises(MediaBlockedError, match=f"got {address} "):
            fetch(f"https://{host}/", MediaPolicy())
    with pytest.raises(MediaFetchError, match="resolves to no address"):
        fetch("https://nowhere.test/", MediaPolicy())


def test_connection_goes_to_the_checked_address(site, monkeypatch):
    # The first answer is allowed, and every later one is not: a second look-up would be caught.
    answers = iter([["127.0.0.1"]])
    monkeypatch.setattr(fetching, "resolve", lambda host, port: next(answers))
    assert fetch(site.url(host="images.test"), LOOPBACK) == PNG
    assert site.asked[0][1]["Host"] == f"images.test:{site.server_port}"


def test_only_the_allowed_of_several_addresses_is_used_and_the_next_tried(site, names, monkeypatch):
    names["mixed.test"] = ["10.0.0.1", "127.0.0.2", "127.0.0.1"]
    tried: list[str] = []
    connect = socket.create_connection

    def recording(address: tuple[str, int], *arguments: Any, **options: Any) -> socket.socket:
        tried.append(address[0])
        return connect(address, *arguments, **options)

    monkeypatch.setattr(socket, "create_connection", recording)
    policy = replace(LOOPBACK, allow_networks=("127.0.0.0/8",))
    assert fetch(site.url(host="mixed.test"), policy) == PNG
    assert tried == ["127.0.0.2", "127.0.0.1"]


def test_redirects_are_followed_and_credentials_stay_with_their_host(site):
    site.answers["/a%20b.png"] = body(PNG)
    for status in (301, 302, 303, 307, 308):
        site.answers["/from"] = redirect("/a b.png?x=1", status)
        assert fetch(site.url("/from"), LOOPBACK) == PNG
    site.asked.clear()
    site.answers["/from"] = redirect(site.url())
    assert fetch(site.url("/from", "me:p%40ss@127.0.0.1"), LOOPBACK) == PNG
    assert site.asked[0][1]["Authorization"] == "Basic bWU6cEBzcw=="
    assert "Authorization" not in site.asked[1][1]


def test_redirect_may_lead_neither_inside_nor_out_of_http(site, names, sentence):
    names["127.0.0.1"] = ["127.0.0.1"]
    names.update({"169.254.169.254": ["169.254.169.254"], "trap": ["10.0.0.1"]})
    targets = ("http://169.254.169.254/latest", "//trap/x", "file://a/b", "data://a/b", "ftp://a/b")
    for target in targets:
        site.answers["/from"] = redirect(target)
        with pytest.raises(MediaBlockedError) as caught:
            fetch(site.url("/from"), LOOPBACK)
        assert said(caught, site.server_port) == sentence


def test_redirects_are_counted(site, sentence):
    site.answers["/loop"] = redirect("/loop")
    with pytest.raises(MediaLimitError) as caught:
        fetch(site.url("/loop"), LOOPBACK)
    assert len(site.asked) == LOOPBACK.max_redirects + 1
    assert said(caught, site.server_port) == sentence


def test_statuses_other_than_200(site, sentence):
    site.answers["/gone"] = body(b"no", 404)
    site.answers["/empty"] = body(b"", 204)
    site.answers["/lost"] = body(b"", 302)
    for path in ("/gone", "/empty", "/lost"):
        with pytest.raises(MediaFetchError) as caught:
            fetch(site.url(path + "?k=SECRET"), LOOPBACK)
        assert said(caught, site.server_port) == sentence


def test_oversized_bodies(site, sentence):
    policy = replace(LOOPBACK, max_bytes=1000)
    site.answers["/stated"] = raw(b"HTTP/1.0 200 OK\r\nContent-Length: 1001\r\n\r\n")
    site.answers["/unstated"] = body(bytes(1001), content_length="")
    site.answers["/fits"] = body(bytes(1000), content_length="")
    for path in ("/stated", "/unstated"):
        with pytest.raises(MediaLimitError) as caught:
            fetch(site.url(path), policy)
        assert said(caught, site.server_port) == sentence
    assert fetch(site.url("/fits"), policy) == bytes(1000)


def test_broken_answers(site):
    ok, chunked = b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"
    protocol = "could not be fetched (RemoteProtocolError: "
    for answer, problem in [
        (
            raw(ok + b"Content-Length: 100\r\n\r\nabc"),
            "peer closed connection without sending complete message",
        ),
        (body(b"x", content_encoding="gzip"), "came compressed ('gzip') although that was not asked for"),
        (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), f"{protocol}illegal status line"),
        (raw(b""), f"{protocol}Server disconnected without sending a response.)"),
        (raw(chunked), f"{protocol}illegal chunk header"),
        (raw(ok + b"A: b\r\n" * 50_000 + b"\r\n"), f"{protocol}Receive buffer too long)"),
    ]:
        site.answers["/broken"] = answer
        caught = error_of(MediaFetchError, fetch, site.url("/broken"), LOOPBACK)
        assert caught.startswith(f"{site.url('/broken')} ")
        assert problem in caught


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nabc"])
def test_silent_server(site, sent, sentence):
    site.answers["/slow"] = raw(sent, wait=site.released)
    with pytest.raises(MediaLimitError) as caught:
        fetch(site.url("/slow"), SLOW)
    assert said(caught, site.server_port) == sentence


@pytest.mark.parametrize("start", [b"HTTP/1.0 200 OK\r\nX: ", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_server_that_drips_is_stopped_by_the_total_timeout(site, start):
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while not site.released.wait(0.02):
            handler.wfile.write(b"x")

    site.answers["/drip"] = drip
    with pytest.raises(MediaLimitError, match=r"too slow \(total_timeout\)"):
        fetch(site.url("/drip"), replace(LOOPBACK, total_timeout=0.4))


def test_slow_resolver(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(fetching, "resolve", lambda host, port: released.wait(30))
    try:
        with pytest.raises(MediaLimitError, match=r"too slow \(connect_timeout\)"):
            fetch("http://images.test/", MediaPolicy(connect_timeout=0.1))
    finally:
        released.set()


def test_unreachable(names, sentence):
    assert error_of(MediaFetchError, fetch, "http://nosuch.test/a.png", MediaPolicy()) == sentence
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    names["images.test"] = ["127.0.0.1"]
    with pytest.raises(MediaFetchError) as caught:
        fetch(f"http://images.test:{port}/", LOOPBACK)
    assert said(caught, port) == sentence


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a", "http://a:99999/", "http://a:b/", "http://[::1/", "http://" + "a" * 70 + "/"],
)
def test_urls_without_a_host(url):
    assert "is not a URL with a host" in error_of(MediaFetchError, fetch, url, MediaPolicy())


def test_printed_urls():
    assert printable_url("https://me:pw@host:1/a/b?sig=1#x") == "https://host:1/a/b?..."
    assert printable_url("https://host/ü\n") == "https://host/\\xfc"
    assert printable_url("https://host/" + "a" * 300).endswith("a... (313 characters)")
    assert printable_url("http://[::1") == "http: URL"


# ------------------------------------------------------------------------------------------ TLS


@pytest.fixture
def secure_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An https site whose certificate is for `images.test`; `asked` also keeps the server names."""
    site = Site()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    context.sni_callback = lambda sock, name, _: site.asked.append(("SNI", {"name": str(name)}))
    site.socket = context.wrap_socket(site.socket, server_side=True)
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    monkeypatch.setattr(fetching, "_tls_context", lambda _: trusting)
    with serving(site) as running:
        running.answers["/a.png"] = body(PNG)
        yield running


def test_tls_name_is_that_of_the_url_and_the_certificate_is_trusted(secure_site, names):
    names.update({"images.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    port = secure_site.server_port
    assert fetch(f"https://images.test:{port}/a.png", LOOPBACK) == PNG
    assert secure_site.asked[0] == ("SNI", {"name": "images.test"})
    assert secure_site.asked[1][1]["Host"] == f"images.test:{port}"
    with pytest.raises(MediaFetchError, match=r"CERTIFICATE_VERIFY_FAILED.*not valid for 'other.test'"):
        fetch(f"https://other.test:{port}/a.png", LOOPBACK)
    names["images.test"] = ["127.0.0.1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "_tls_context", OWN_CONTEXT)
        with pytest.raises(MediaFetchError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(f"https://images.test:{secure_site.server_port}/a.png", LOOPBACK)


def test_redirect_from_https_to_http_is_refused(secure_site, names, sentence):
    names["images.test"] = ["127.0.0.1"]
    url = f"https://images.test:{secure_site.server_port}/from"
    secure_site.answers["/from"] = redirect("http://images.test/a.png")
    with pytest.raises(MediaBlockedError) as caught:
        fetch(url, LOOPBACK)
    assert said(caught, secure_site.server_port) == sentence


SURROGATE = "\ud800"


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{SURROGATE}",
        f"http://127.0.0.1:1/{SURROGATE}",
        f"http://127.0.0.1:1/?q={SURROGATE}",
        f"http://{SURROGATE}:secret@127.0.0.1:1/",
        f"http://{SURROGATE}.example/",
    ],
)
def test_a_lone_surrogate_in_a_url_is_a_media_error(url):
    source_fingerprint(url)
    with pytest.raises(MediaError):
        load_image(url, MediaPolicy())

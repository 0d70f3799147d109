from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio.connection import UnixDomainSocketConnection

from loader.errors import RegistryRecordError
from loader.registry import open_registry
from loader.registry.directory import DirectoryRegistry
from loader.registry.redis_registry import RedisRegistry, TlsConnection, parse_redis_url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b", "/a/b"),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a%20b", "/a b"),
        ("/a%20b", "/a%20b"),
        ("relative", str(Path.cwd() / "relative")),
    ],
)
def test_a_path_or_a_file_url_is_a_directory(url, path):
    registry = open_registry(url)
    assert isinstance(registry, DirectoryRegistry)
    assert str(registry.path) == path
    assert str(open_registry(registry.url).path) == path


TLS = {"connection_class": TlsConnection, "ssl_password": ""}
UNIX = {"connection_class": UnixDomainSocketConnection}
HOST = {"host": "host", "db": 0}


@pytest.mark.parametrize(
    ("url", "fleet", "connection"),
    [
        ("redis://host", "default", HOST),
        ("redis://host:7000/3?fleet=eu-1", "eu-1", {"host": "host", "port": 7000, "db": 3}),
        ("redis://[::1]:7000/", "default", {"host": "::1", "port": 7000, "db": 0}),
        ("redis://:p%40ss%2F@host", "default", {**HOST, "password": "p@ss/"}),
        ("redis://user:secret@host", "default", {**HOST, "username": "user", "password": "secret"}),
        (
            "rediss://:secret@host/1",
            "default",
            {**HOST, "db": 1, "password": "secret", **TLS},
        ),
        ("unix:///run/redis.sock?fleet=a", "a", {"path": "/run/redis.sock", **UNIX}),
        ("unix://:secret@/run/redis.sock", "default", {"path": "/run/redis.sock", **UNIX, "password": "secret"}),
    ],
)
def test_a_redis_url_says_where_and_whose_it_is(url, fleet, connection):
    settings = parse_redis_url(url)
    assert settings.fleet == fleet
    assert settings.connection == connection
    registry = open_registry(url)
    assert isinstance(registry, RedisRegistry)
    assert registry.url == url
    assert "secret" not in registry.name


def test_a_url_of_sentinels_says_whom_to_ask_for_which_master(tmp_path):
    (tmp_path / "password").write_text("wache\n")
    url = f"redis+sentinel://user:p%40%2Css@a,b:7000,c.d/films-1/3?fleet=x&sentinel_password_file={tmp_path}/password"
    settings = parse_redis_url(url)
    assert settings.sentinels == (("a", 26379), ("b", 7000), ("c.d", 26379))
    assert (settings.master, settings.fleet) == ("films-1", "x")
    assert settings.connection == {"db": 3, "username": "user", "password": "p@,ss"}
    assert settings.sentinel_connection == {"username": None, "password": "wache"}
    assert parse_redis_url("rediss+sentinel://[::1]:1/m").sentinels == (("::1", 1),)
    encrypted = parse_redis_url("rediss+sentinel://a/m?sentinel_user=x%2541&" + url.partition("x&")[2])
    assert encrypted.connection == {"db": 0, **TLS}
    assert encrypted.sentinel_connection == {
        "username": "x%41",
        "password": "wache",
        "ssl": True,
        "ssl_password": "",
    }
    registry = open_registry("redis+sentinel://:secret@a,b/m")
    assert registry.name == "redis+sentinel://***@a,b/m"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        *((url, "URL") for url in ("", "http://host/", "file://host/a", "file:///a?fleet=x", "file://", "s3://b/a")),
        ("redis://", "allowed are redis"),
        ("redis://:secret@", "allowed are redis"),
        ("redis://:secret@host/x", "DB a number"),
        ("redis://:secret@host/1/2", "DB a number"),
        ("redis://:secret@host:port", "can't be read"),
        ("redis://:secret", "can't be read"),
        ("redis://:secret@host:70000", "can't be read"),
        ("redis://:secret@host?flet=a", r"options \['flet'\]; allowed is each of \('fleet'"),
        ("redis://:secret@host?fleet=a&fleet=b", "once"),
        ("redis://:secret@host?fleet=a%20b", "fleet 'a b'; allowed are"),
        ("redis://:secret@host?fleet=", "fleet ''; allowed are"),
        ("redis://:secret@host?fleet", "can't be read"),
        ("redis://:secret@host#a", "allowed are redis"),
        ("redis://:secret@host?ssl_ca_certs=/a", "ssl_ca_certs: only for rediss"),
        ("rediss://:secret@host?ssl_ca_certs=/none", "ssl_ca_certs /none: .+No such file"),
        ("redis://:secret@host?ssl_certfile=/a&ssl_keyfile=/b", "ssl_certfile, ssl_keyfile: only for rediss"),
        (
            "rediss://:secret@host?ssl_certfile=/none&ssl_keyfile=/b",
            "/none, ssl_keyfile /b: .+No such file",
        ),
        ("rediss://:secret@host?ssl_keyfile=/etc/passwd", "ssl_keyfile /etc/passwd: certfile should be"),
        (
            "rediss://:secret@h?ssl_certfile=/etc/passwd&ssl_keyfile=/etc/passwd",
            "passwd, ssl_keyfile /etc",
        ),
        ("redis://:secret@host?password_file=/a", "a password and a password_file; one is allowed"),
        ("redis://host?password_file=/none", "password_file /none: .+No such file"),
        ("redis://host?password_file=/dev/null", "password_file /dev/null: it is empty"),
        ("redis://host?sentinel_user=u", "sentinel_user: only for redis.sentinel"),
        ("redis://u@host", "a user without a password"),
        ("unix://host/a", "allowed are redis"),
        ("unix://", "allowed are redis"),
        ("redis+sentinel://:secret@", "can't be read"),
        ("redis+sentinel://:secret@host:port/m", "can't be read"),
        ("redis+sentinel://:secret@a,,b/m", "can't be read"),
        ("redis+sentinel://:secret@a,b:70000/m", "can't be read"),
        ("redis+sentinel://:secret@a", "/MASTER"),
        ("redis+sentinel://:secret@a/m n", "/MASTER"),
        ("redis+sentinel://:secret@a/m/x", "/MASTER.+DB a number"),
        ("redis+sentinel://:secret@a/m?ssl_ca_certs=/a", "ssl_ca_certs: only for rediss"),
        ("redis+sentinel://:secret@a/m?sentinel_password_file=/none", "sentinel_password_file /none: .+No such file"),
        ("unix+sentinel://:secret@a/m", "allowed are a path, file:///PATH, redis://"),
    ],
)
def test_a_url_with_a_mistake_is_refused_without_its_password(url, message):
    with pytest.raises(RegistryRecordError, match=message) as failure:
        open_registry(url)
    assert "secret" not in str(failure.value)

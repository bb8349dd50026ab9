"""The page's files, without a browser."""

from __future__ import annotations

import re

import httpx

from rlhfless.control.api.page import FOLDER


def test_every_file_is_served_with_a_strict_policy_and_an_etag(client: httpx.Client) -> None:
    for path in ["/", *(f"/page/{file.name}" for file in FOLDER.iterdir())]:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_types_are_what_modules_need(client: httpx.Client) -> None:
    assert client.get("/page/app.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/page/style.css").headers["content-type"].startswith("text/css")


def test_nothing_outside_the_folder_is_served(client: httpx.Client) -> None:
    for path in ("/page/none.js", "/page/..%2Fapi%2Fpage.py", "/page/%2e%2e%2fservice.py"):
        assert client.get(path).status_code == 404


LINKS = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot", "https://github.com/nodeca/js-yaml"}
"""A namespace, and what licence comments of libraries name: none is ever fetched, which the policy would refuse."""


def test_nothing_comes_from_elsewhere() -> None:
    for file in FOLDER.iterdir():
        assert set(re.findall(r"https?://[\w./-]+", file.read_text("utf-8"))) <= LINKS, file.name


def test_every_module_that_is_imported_is_preloaded() -> None:
    index = (FOLDER / "index.html").read_text("utf-8")
    modules = {file.name for file in FOLDER.glob("*.js") if file.name not in LIBRARIES}
    assert modules == set(re.findall(r'modulepreload" href="/page/([\w.]+)"', index))


LIBRARIES = {"uPlot.iife.min.js": "uPlot.LICENSE.txt", "js-yaml.esm.min.mjs": "js-yaml.LICENSE.txt"}
"""Files of others, as they were published, with their licences."""


def test_libraries_have_their_licences_beside_them() -> None:
    for library, licence in LIBRARIES.items():
        assert (FOLDER / library).stat().st_size < 100_000
        assert "Permission is hereby granted, free of charge" in (FOLDER / licence).read_text("utf-8")

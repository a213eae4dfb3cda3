"""What the tests' own small servers say on the wire, and what is given back to the machine; needs no cluster."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from urllib.parse import parse_qs, quote

from .cluster_dns import answer, name_of
from .device_plugin import DRIVER, _part, _parts, _text, allotted
from .docker_engine import _restoring
from .kubelet import KernelSettings
from .node_engine import NODE_LABEL, filtered, labelled


def _query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def test_names_are_answered_with_all_addresses() -> None:
    question = _query("rank-0.Job.shop.svc.cluster.local")
    assert name_of(question) == "rank-0.job.shop.svc.cluster.local"
    said = answer(question, ["172.17.0.5", "172.17.0.6"])
    number, flags, questions, answers, _, _ = struct.unpack("!HHHHHH", said[:12])
    assert (number, flags & 0x800F, questions, answers) == (7, 0x8000, 1, 2)
    assert said[len(question) :].count(socket.inet_aton("172.17.0.5")) == 1


def test_an_unknown_name_is_none_and_another_type_is_empty() -> None:
    assert struct.unpack("!HHHH", answer(_query("nothing.svc.cluster.local"), [])[:8])[1] & 15 == 3
    said = struct.unpack("!HHHH", answer(_query("there.svc.cluster.local", kind=28), ["172.17.0.5"])[:8])
    assert said[1] & 15 == 0 and said[3] == 0


def test_a_node_creates_with_its_label_and_lists_by_it() -> None:
    assert json.loads(labelled(b'{"Image": "x", "Labels": null}', "node-a"))["Labels"] == {NODE_LABEL: "node-a"}
    for given in ({}, {"label": ["a=b"]}, {"label": {"a=b": True}, "status": ["running"]}):
        query = f"?all=1&filters={quote(json.dumps(given))}" if given else ""
        head = filtered(f"GET /v1.40/containers/json{query} HTTP/1.1\r\nHost: docker\r\n\r\n".encode(), "node-a").decode()
        path, version = head.split("\r\n")[0].removeprefix("GET ").rsplit(" ", 1)
        assert path.startswith("/v1.40/containers/json?") and version == "HTTP/1.1" and head.endswith("\r\nHost: docker\r\n\r\n")
        labels = json.loads(parse_qs(path.partition("?")[2])["filters"][0])["label"]
        assert {f"{NODE_LABEL}=node-a", *given.get("label", ())} == set(labels)
    other = b"GET /v1.40/containers/abc/json HTTP/1.1\r\n\r\n"
    assert filtered(other, "node-a") == other


def test_parts_of_a_message_come_back() -> None:
    long = "x" * 300
    assert [one.decode() for one in _parts(_text(1, "3") + _text(1, long))] == ["3", long]
    assert next(_parts(_part(1, _text(1, "a")))) == _text(1, "a")


def test_what_a_container_gets_is_a_variable_and_a_folder_to_read() -> None:
    said = allotted("2,3", Path("/somewhere"))
    variable = next(_parts(said))
    assert list(_parts(variable)) == [b"ASCEND_VISIBLE_DEVICES", b"2,3"]
    mount = said[len(_part(1, variable)) :]
    path, place = DRIVER.encode(), b"/somewhere"
    # Mount: container_path 1, host_path 2, read_only 3 (a number).
    assert mount == bytes([0x12, len(path) + len(place) + 6, 0x0A, len(path)]) + path + bytes([0x12, len(place)]) + place + bytes([0x18, 1])
    assert allotted("2,3", None) == _part(1, variable)


def test_the_kernel_has_its_settings_back_even_after_a_run_that_was_killed(tmp_path: Path) -> None:
    setting, kept = tmp_path / "system/kernel/panic", tmp_path / "kept.json"
    setting.parent.mkdir(parents=True)
    setting.write_text("1\n")
    KernelSettings(tmp_path / "system", kept).__enter__()
    setting.write_text("10\n")  # and nobody leaves
    with KernelSettings(tmp_path / "system", kept):
        setting.write_text("10\n")
    assert setting.read_text() == "1\n" and not kept.exists()


def test_tables_that_were_not_there_are_emptied_and_the_others_come_back() -> None:
    saved = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j MINE\nCOMMIT\n"
    assert _restoring(saved)[0] == saved
    for rules, absent in (("", {"*filter", "*nat"}), (saved, {"*filter"}), (saved + "*filter\nCOMMIT\n", set())):
        emptied = [text for text in _restoring(rules) if text != rules]
        assert {text.partition("\n")[0] for text in emptied} == absent
        assert all(text.endswith("COMMIT\n") and "-A" not in text for text in emptied)

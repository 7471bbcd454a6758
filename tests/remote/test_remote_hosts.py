"""hosts.yaml: every complaint names the file, the line and the field; the example that ships is good."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from harness.remote.hosts import Gpus, Host, HostsError, Limits, parse, read
from harness.sources import ROOT

GOOD = """\
hosts:
  box:
    address: box.example
    user: me
    port: 2222
    host_key: SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
    workdir: ~/work
    python: ~/venv/bin/python
    environment:
      CUDA_VISIBLE_DEVICES: 0,1
      OMP_NUM_THREADS: 8
    architectures: [sm_90, sm_120, sm_103a]
    gpus: {count: 2, kind: H200}
    features: [nvcc, avx2]
    prepare: [". /etc/profile", module load cuda]
    lock: /tmp/other.lock
    keep_runs: 0
    limits: {connect: 1.5, silence: 5}
"""


def test_every_field() -> None:
    host = parse(GOOD)["box"]
    assert host == Host(
        name="box",
        address="box.example",
        user="me",
        port=2222,
        host_key="SHA256:" + "A" * 43,
        workdir="~/work",
        python="~/venv/bin/python",
        environment={"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "8"},
        architectures=("sm_90", "sm_120", "sm_103a"),
        gpus=Gpus(2, "H200"),
        features=("nvcc", "avx2"),
        prepare=(". /etc/profile", "module load cuda"),
        lock="/tmp/other.lock",
        keep_runs=0,
        limits=Limits(connect=1.5, silence=5.0),
    )
    assert host.capabilities == ("9.0", "12.0", "10.3a")
    assert host.devices == ("cpu", "cuda")


def test_the_example_that_ships() -> None:
    host = read(ROOT / "hosts.yaml")["ct200"]
    assert host.gpus == Gpus(8, "RTX PRO 6000 Blackwell")
    assert host.capabilities == ("12.0",)
    assert host.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def at(line: int, field: str, reason: str) -> tuple[int, str, str]:
    return line, field, reason


def test_a_host_key_as_ssh_keyscan_prints_it() -> None:
    """Its type stands in the key itself, behind that name's length; what follows the key is a comment."""
    kind = b"ssh-ed25519"

    def key(blob: bytes, *more: str) -> str:
        return " ".join(["ssh-ed25519", base64.b64encode(blob).decode(), *more])

    good = key(len(kind).to_bytes(4, "big") + kind + b"\0\0\0\1x")
    for given in (good, f"{good} root@box and more"):
        host = parse(f"hosts: {{a: {{address: x, host_key: '{given}'}}}}")["a"]
        assert host.host_key == good
        assert host.devices == ("cpu",)
    size = len(kind).to_bytes(4, "big")
    for bad in ("ssh-ed25519", good[:-1], key(kind), key(b"x" + size + kind), key(len(kind).to_bytes(3, "big") + kind)):
        with pytest.raises(HostsError, match="as ssh-keyscan prints it"):
            parse(f"hosts: {{a: {{address: x, host_key: '{bad}'}}}}")


BAD = {
    "": at(1, "hosts", "missing"),
    "{}": at(1, "hosts", "missing"),
    "- a": at(1, "file", "expected fields, found a list"),
    "host: {}": at(1, "host", "unknown field"),
    "hosts: {}\nmore: 1": at(2, "more", "unknown field"),
    "hosts:\n  - a": at(2, "hosts", "expected fields, found a list"),
    "hosts:\n  no: {address: x}": at(2, "hosts", "'no' is not a name; quote it"),
    "hosts:\n  a/b: {address: x}": at(2, "hosts.a/b", "letters, digits"),
    "hosts:\n  a: {address: x}\n  a: {address: y}": at(3, "hosts.a", "given twice"),
    "hosts:\n  a:\n    user: me": at(3, "hosts.a", "address is missing"),
    "hosts:\n  a: {address: }": at(2, "hosts.a.address", "expected text, found nothing"),
    "hosts:\n  a: {address: me@box}": at(2, "hosts.a.address", "`user` and `port` are fields of their own"),
    "hosts:\n  a: {address: 'box:2222'}": at(2, "hosts.a.address", "`user` and `port` are fields of their own"),
    "hosts:\n  a: {address: x, gpus: 8}": at(2, "hosts.a.gpus", "expected fields (count, kind), found '8'"),
    "hosts:\n  a: {address: 10}": at(2, "hosts.a.address", "expected text, found '10'"),
    "hosts:\n  a: {address: [x]}": at(2, "hosts.a.address", "expected text, found a list"),
    "hosts:\n  a:\n    address: x\n    prot: 22": at(4, "hosts.a.prot", "did you mean port?"),
    "hosts:\n  a:\n    address: x\n    port: 0": at(4, "hosts.a.port", "from 1 to 65535, found '0'"),
    "hosts:\n  a:\n    address: x\n    port: '22'": at(4, "hosts.a.port", "expected an integer"),
    "hosts:\n  a:\n    address: x\n    port: 22.5": at(4, "hosts.a.port", "expected an integer"),
    "hosts:\n  a: {address: x, password: y}": at(2, "hosts.a.password", "no secrets here"),
    "hosts:\n  a: {address: x, environment: {HF_TOKEN: y}}": at(2, "hosts.a.environment.HF_TOKEN", "no secrets here"),
    "hosts:\n  a: {address: x, environment: {A B: y}}": at(2, "hosts.a.environment.A B", "not the name"),
    "hosts:\n  a: {address: x, environment: {A: yes}}": at(2, "hosts.a.environment.A", "found 'yes'; quote it"),
    "hosts:\n  a: {address: x, host_key: abc def}": at(2, "hosts.a.host_key", "as ssh-keyscan prints it"),
    "hosts:\n  a: {address: x, host_key: 'ssh-rsa AAAAC3NzaC1lZDI1NTE5'}": at(2, "hosts.a.host_key", "ssh-keyscan"),
    "hosts:\n  a: {address: x, host_key: 'MD5:00'}": at(2, "hosts.a.host_key", "SHA256"),
    "hosts:\n  a: {address: x, workdir: relative}": at(2, "hosts.a.workdir", "begins with / or ~/"),
    "hosts:\n  a:\n    address: x\n    architectures:\n    - sm_120\n    - '12.0'": at(
        6, "hosts.a.architectures[1]", "an architecture like sm_120"
    ),
    "hosts:\n  a: {address: x, gpus: {count: 8}}": at(2, "hosts.a.gpus", "kind is missing"),
    "hosts:\n  a: {address: x, gpus: {count: 8, kind: y}}": at(2, "hosts.a", "architectures is missing"),
    "hosts:\n  a: {address: x, gpus: {count: -1, kind: y}}": at(2, "hosts.a.gpus.count", "from 1 to"),
    "hosts:\n  a: {address: x, limits: {silence: 0}}": at(2, "hosts.a.limits.silence", "from 0.1 to"),
    "hosts:\n  a: {address: x, limits: {silence: nan}}": at(2, "hosts.a.limits.silence", "found 'nan'"),
    "hosts:\n  a: {address: x, limits: {slience: 1}}": at(2, "hosts.a.limits.slience", "did you mean silence?"),
    "hosts:\n  a: {address: x, prepare: make}": at(2, "hosts.a.prepare", "expected a list"),
    "hosts:\n  a: {address: x, features: [[y]]}": at(2, "hosts.a.features[0]", "found a list"),
    "hosts: {a: &x {address: y}, b: {<<: *x}}": at(1, "hosts.b", "'<<' is not a name"),
    "hosts: [": at(1, "not YAML", ""),
    "hosts:\n  a: b: c": at(2, "not YAML", ""),
}


@pytest.mark.parametrize("text", BAD)
def test_a_complaint_names_file_line_and_field(text: str) -> None:
    line, field, reason = BAD[text]
    with pytest.raises(HostsError) as caught:
        parse(text, "my.yaml")
    assert str(caught.value).startswith(f"my.yaml:{line}: {field}")
    assert reason in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="No such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "latin").write_bytes(b"hosts: \xe9")
    with pytest.raises(HostsError, match="not UTF-8 at byte 7"):
        read(tmp_path / "latin")
    (tmp_path / "zero").write_bytes(b"hosts: \0")
    with pytest.raises(HostsError, match="zero: not YAML"):
        read(tmp_path / "zero")


def test_nothing_is_constructed_from_yaml() -> None:
    assert parse("hosts: !!python/object/apply:os.abort {}") == {}


def test_tokenizers_parallelism_is_no_secret() -> None:
    assert parse("hosts: {a: {address: x, environment: {TOKENIZERS_PARALLELISM: 'false'}}}")["a"].environment

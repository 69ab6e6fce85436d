"""Parameter servers that are killed and started again."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core.errors import DataLossError, UnavailableError
from tfstyle_dist.parameter_server.persistence.record_files import RecordFile, read_records, read_what_is_whole
from tfstyle_dist.parameter_server.protocol import pickling

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"ps-*/*.{kind}"))


def saved(c: Any) -> bool:
    """Whether each server's last complete snapshot has all that this process has changed."""
    return not any(s["unsaved"] for s in c.statistics())


def test_training_goes_on_after_a_server_was_killed(cluster: Any, tmp_path: Path) -> None:
    """Adam's state, a sparse table, a learning rate that changed and a variable come back; the program stays."""
    folder = tmp_path / "snapshots"
    c = cluster(workers=2, ps=2, snapshot_folder=folder, snapshot_seconds=0.05)
    with c.strategy.scope():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        count = td.Variable(0, dtype=torch.int64)
    table = c.strategy.embedding(20, 2, initializer=("normal", 0.0, 1.0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict({k: v.detach().clone() for k, v in net.state_dict().items()})
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)

    def train(module: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()

    def step(x: torch.Tensor) -> None:
        train(net, optimizer, x)
        count.assign_add(1)

    rows = table(torch.arange(20)).detach()
    for number in range(6):
        if number == 4:
            optimizer.param_groups[0]["lr"] = plain_optimizer.param_groups[0]["lr"] = 0.01
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        c.coordinator.schedule(step, args=(x,))
        c.coordinator.join(timeout=30)
        train(plain, plain_optimizer, x)
        if number in (2, 4):
            wait_until(lambda: saved(c))
            for index in range(2):
                c.kill("ps", index)
                c.start("ps", index)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-6)
    assert int(count.value()) == 6
    assert torch.equal(table(torch.arange(20)).detach(), rows)
    wait_until(lambda: saved(c))
    assert len(files(folder, "snapshot")) == 2 * 2
    assert len(files(folder, "journal")) <= 2 * 3
    assert not list(folder.glob("ps-*/*.tmp"))
    c.strategy.close()
    wait_until(lambda: not folder.exists())  # a session that has ended leaves nothing


def newest(folder: Path) -> list[Path]:
    return [max(d.glob("*.snapshot"), key=lambda p: p.stat().st_mtime_ns) for d in folder.iterdir()]


@pytest.mark.timeout(180)
def test_no_write_is_lost_or_made_twice_when_servers_and_workers_are_killed(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=2, snapshot_folder=tmp_path / "s", snapshot_seconds=0.2, snapshot_every_write=True)
    with c.strategy.scope():
        counts = [td.Variable(0, dtype=torch.int64) for _ in range(2)]
        weight = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        weight.weight.fill_(0.0)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)

    def add() -> None:
        counts[0].assign_add(1)
        optimizer.zero_grad()
        weight(torch.ones(1, 2)).sum().backward()
        optimizer.step()  # subtracts 1
        counts[1].assign_add(1)

    number = 2000
    for _ in range(number):
        c.coordinator.schedule(add)
    with c.random_kills({"ps": 2, "worker": 2}, seconds=0.1, seed=1, progress=100) as kills:
        c.coordinator.join(timeout=150)
    assert [int(v.value()) for v in counts] == [number, number]
    assert weight.weight.detach().tolist() == [[-number, -number]]
    assert kills[0] >= 2


def test_a_write_that_does_not_fit_on_the_disk_is_refused_and_the_next_ones_are_kept(
    cluster: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    c = cluster(workers=1, ps=1, snapshot_folder=folder, snapshot_seconds=3600, snapshot_every_write=True)
    with c.strategy.scope():
        value = td.Variable(torch.zeros(1 << 14))
    value.assign_add(torch.ones(1 << 14))
    no_limit = resource.RLIM_INFINITY
    full = files(folder, "journal")[-1].stat().st_size + 1000  # half of the next record fits
    resource.prlimit(c.pids["ps", 0], resource.RLIMIT_FSIZE, (full, no_limit))
    with pytest.raises(DataLossError, match=r"made this write.*snapshot_every_write"):
        value.assign_add(torch.ones(1 << 14))
    resource.prlimit(c.pids["ps", 0], resource.RLIMIT_FSIZE, (no_limit, no_limit))
    value.assign_add(torch.ones(1 << 14))
    assert value.value().eq(3).all()
    c.kill("ps", 0)
    c.start("ps", 0)
    # The write that was refused is there if a snapshot was made since; the others are in any case.
    assert value.value().ge(2).all()


def test_a_restarted_server_without_snapshots_is_said_so(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        value = td.Variable(1.0)
    assert c.coordinator.schedule(lambda: float(value.value())).get(timeout=30) == 1.0
    c.kill("ps", 0)
    with pytest.raises(UnavailableError, match=r"/job:ps/task:0.*snapshot_folder="):
        value.value()
    c.start("ps", 0)
    wait_until(lambda: fails(c, "without its variables"))
    with pytest.raises(UnavailableError, match="snapshot_folder="):
        c.coordinator.schedule(lambda: float(value.value())).get(timeout=30)


def fails(c: Any, message: str) -> bool:
    try:
        c.coordinator.done()
        return False
    except UnavailableError as error:
        return message in str(error)


def test_a_server_that_finds_no_snapshot_says_where_it_looked(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    c = cluster(workers=1, ps=1, snapshot_folder=folder, snapshot_seconds=60)
    with c.strategy.scope():
        value = td.Variable(1.0)
    c.kill("ps", 0)
    for path in folder.glob("ps-0/*"):
        path.unlink()
    c.start("ps", 0)
    with pytest.raises(UnavailableError, match=str(folder)):
        value.value()


def test_a_server_that_does_not_come_back(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=1, ps=1, snapshot_folder=tmp_path / "s", env={"TFSTYLE_TIMEOUT_SECONDS": "2"})
    with c.strategy.scope():
        value = td.Variable(1.0)
    assert c.coordinator.schedule(lambda: float(value.value())).get(timeout=30) == 1.0
    c.kill("ps", 0)
    c.coordinator.schedule(lambda: float(value.value()))
    with pytest.raises(UnavailableError, match="did not come back within 2 s"):
        c.coordinator.join(timeout=30)


def test_a_damaged_snapshot_gives_way_to_the_one_before(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    c = cluster(workers=1, ps=1, snapshot_folder=folder, snapshot_seconds=0.05)
    with c.strategy.scope():
        value = td.Variable(1.0)
    value.assign(2.0)
    wait_until(lambda: saved(c))
    before = newest(folder)[0]
    value.assign(3.0)
    wait_until(lambda: saved(c))
    newest_file = newest(folder)[0]
    assert files(folder, "snapshot") == [before, newest_file]
    c.kill("ps", 0)
    content = bytearray(newest_file.read_bytes())
    content[len(content) // 2] ^= 255
    newest_file.write_bytes(content)
    c.start("ps", 0)
    assert float(value.value()) == 2.0


def test_a_damaged_record_of_a_journal_takes_no_other_with_it(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    c = cluster(workers=1, ps=1, snapshot_folder=folder, snapshot_seconds=3600, snapshot_every_write=True)
    with c.strategy.scope():
        value = td.Variable(torch.zeros(100))
    places = []
    for _ in range(5):
        value.assign_add(torch.ones(100))
        places.append(files(folder, "journal")[-1].stat().st_size)
    c.kill("ps", 0)
    path = files(folder, "journal")[-1]
    content = bytearray(path.read_bytes())
    content[(places[1] + places[2]) // 2] ^= 1
    path.write_bytes(content + b"tfSR half a record")
    c.start("ps", 0)
    assert value.value().eq(4).all()
    assert f"{path} is damaged: what its bytes {places[1]} to {places[2]} kept is lost" in c.output()
    assert f"{path}: the last 18 bytes are no whole record" in c.output()


def test_records_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records"
    file = RecordFile(path)
    file.write([b"one", b"", bytes(100)])
    file.write([b"two"])
    file.close()
    assert list(read_records(path)) == [[b"one", b"", bytes(100)], [b"two"]]
    assert path.stat().st_mode & 0o077 == 0
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert list(read_what_is_whole(path)) == [[b"one", b"", bytes(100)]]
    assert "left out" in caplog.text
    with pytest.raises(DataLossError, match="byte"):
        list(read_records(path))
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataLossError):
            list(read_records(path))
        caplog.clear()
        kept = list(read_what_is_whole(path))
        assert kept in ([[b"two"]], [[b"one", b"", bytes(100)]])
        assert ("is damaged" if kept == [[b"two"]] else "left out") in caplog.text


@pytest.mark.parametrize("options", [{"snapshot_seconds": 0}, {"snapshot_every_write": True}, {"max_staleness": -1}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    spec = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    resolver = td.cluster_resolver.SimpleClusterResolver(td.cluster_resolver.ClusterSpec(spec), "", "chief", 0)
    with pytest.raises(ValueError, match=next(iter(options))):
        td.ParameterServerStrategy(resolver, **options)


class Told:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["snapshot", "journal"])
@pytest.mark.parametrize("writable", ["by others", "by a link"])
def test_what_others_may_have_written_is_not_unpickled(cluster: Any, tmp_path: Path, kind: str, writable: str) -> None:
    """A server without rights over other users can only be shown files that others may write."""
    folder, ran = tmp_path / "s", tmp_path / "ran"
    c = cluster(workers=1, ps=1, snapshot_folder=folder, snapshot_seconds=3600)
    with c.strategy.scope():
        value = td.Variable(1.0)
    c.kill("ps", 0)
    planted = folder / "ps-0" / f"{c.strategy.session}-9.{kind}"
    target = planted if writable == "by others" else tmp_path / "elsewhere"
    file = RecordFile(target)
    call = [b"call", b'{"method": "optimizer", "number": 7}'] if kind == "journal" else []
    file.write([*call, *(bytes(part) for part in pickling.dumps(Told(ran)))])
    file.close()
    if writable == "by others":
        planted.chmod(0o666)
    else:
        planted.symlink_to(target)
    (folder / "ps-0").chmod(0o777)
    c.start("ps", 0)
    assert float(value.value()) == 1.0
    assert not ran.exists()
    assert f"{planted} belongs to user {os.geteuid()} with mode " in c.output()
    assert (folder / "ps-0").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_snapshot_folder_of_another_user_is_refused(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s" / "ps-0"
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    c = cluster(workers=1, ps=1, coordinator=False)
    with pytest.raises(PermissionError, match=r"belongs to user 65534.*snapshot_folder"):
        c.make_coordinator(snapshot_folder=folder.parent)
    with pytest.raises(PermissionError, match="belongs to user 65534"):  # asked again, it does not go on without
        c.strategy.servers.call_all({"method": "statistics"})

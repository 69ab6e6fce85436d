"""Clusters: what the recorded programs do not cover."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

import tfstyle_dist as tfd
from tfstyle_dist import MultiWorkerMirroredStrategy
from tfstyle_dist.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TPUClusterResolver,
    UnionResolver,
    roles,
)
from tfstyle_dist.cluster_resolver.slurm import expand_hostlist, expand_tasks_per_node
from tfstyle_dist.core import launch_env

TRAINING = {"worker": ["w0:1", "w1:1"], "chief": ["c:1"], "ps": ["p:1"], "evaluator": ["e:1"]}


def simple(cluster: dict, task_type: str | None, task_id: int | None) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=task_id)


def test_chief_comes_first() -> None:
    members, rank = roles.training_tasks(simple(TRAINING, "worker", 1))
    assert [str(task) for task in members] == ["chief 0 (c:1)", "worker 0 (w0:1)", "worker 1 (w1:1)"]
    assert rank == 2


@pytest.mark.parametrize(
    ("task_type", "task_id", "chief"), [("chief", 0, True), ("worker", 0, False), ("evaluator", 0, True)]
)
def test_is_chief(task_type: str, task_id: int, chief: bool) -> None:
    assert roles.is_chief(simple(TRAINING, task_type, task_id)) is chief


def test_worker_0_is_the_chief_of_a_cluster_without_one() -> None:
    cluster = {"worker": ["w0:1", "w1:1"]}
    assert roles.is_chief(simple(cluster, "worker", 0))
    assert not roles.is_chief(simple(cluster, "worker", 1))


def test_evaluator_and_empty_cluster_are_alone() -> None:
    for resolver in (
        simple(TRAINING, "evaluator", 0),
        simple({"worker": ["w:1"]}, "evaluator", 0),
        simple({}, None, None),
    ):
        members, rank = roles.training_tasks(resolver)
        assert (len(members), rank) == (1, 0)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        ({"trainer": ["a:1"]}, "worker", 0, "Disallowed task type.*trainer"),
        ({"worker": ["a:1"]}, "trainer", 0, "Unrecognized task_type: 'trainer'"),
        ({"worker": ["a:1", "b:1"]}, "worker", 2, r"`task_id` 2 exceeds.*\[0, 1\]"),
        ({"worker": ["a:1", "b:1"]}, "worker", None, "index is missing"),
        ({"worker": ["a:1", "b:1"]}, None, None, "is not said"),
        ({"worker": ["a:1", "b:1"]}, "chief", 0, "not found in cluster_spec"),
        ({"worker": ["a:1", "a:1"]}, "worker", 0, "a:1 is given to both worker 0 and worker 1"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "worker", 0, "a:1 is given to both"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "at most one 'chief'"),
        (
            {"worker": {-1: "a:1", 0: "b:1"}},
            "worker",
            0,
            r"worker -1 \(a:1\) with a negative index; write indices from 0",
        ),
        ({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0, "parameter servers do not train"),
    ],
)
def test_wrong_clusters_are_explained(cluster: dict, task_type: str, task_id: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roles.training_tasks(simple(cluster, task_type, task_id))


def test_bad_tf_config_shows_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{'worker': 0}")
    with pytest.raises(json.JSONDecodeError, match=r"(?s)Expecting.*write e\.g\..*\{'worker': 0\}"):
        TFConfigClusterResolver().cluster_spec()
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "first"}}')
    with pytest.raises(ValueError, match="whole number, got 'first'"):
        _ = TFConfigClusterResolver().task_id
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": "worker"}')
    with pytest.raises(ValueError, match='"task" in TF_CONFIG must be an object'):
        _ = TFConfigClusterResolver().task_type


@pytest.mark.parametrize("text", ["null", "1", "2.5", "true", '"{\\"cluster\\": {}}"'])
def test_tf_config_that_holds_no_object_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    resolver = TFConfigClusterResolver()
    for read in (resolver.cluster_spec, resolver.master, lambda: resolver.task_type, lambda: resolver.task_id):
        with pytest.raises(TypeError, match=r"(?s)must hold a JSON object, got .*write e\.g\."):
            read()
    with pytest.raises(TypeError, match="must hold a JSON object"):
        MultiWorkerMirroredStrategy()
    assert TFConfigClusterResolver("worker", 0).task_id == 0  # what is given is not looked up


@pytest.mark.parametrize("text", ["[1, 2]", '"word"', "{}"])
def test_a_list_or_a_word_is_an_empty_cluster_as_in_tensorflow(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert not TFConfigClusterResolver().cluster_spec()


def test_union_takes_a_task_id_of_0_as_not_given() -> None:
    parts = [simple({"worker": [f"{host}:1"]}, None, None) for host in "abc"]
    assert UnionResolver(*parts, task_type="worker", task_id=0).task_id is None
    assert UnionResolver(*parts, task_type="worker", task_id=2).task_id == 2
    assert UnionResolver(simple({}, "worker", 0), task_id=0).task_id == 0


def test_union_merges_by_index_and_refuses_conflicts() -> None:
    sparse = simple({"worker": {1: "b:1", 3: "d:1"}}, None, None)
    merged = UnionResolver(simple({"worker": ["a:1"]}, None, None), sparse).cluster_spec()
    assert merged == {"worker": {0: "a:1", 1: "b:1", 3: "d:1"}}
    with pytest.raises(KeyError, match="Duplicate keys"):
        UnionResolver(simple({"worker": ["a:1", "c:1"]}, None, None), sparse).cluster_spec()
    with pytest.raises(ValueError, match="At least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="must be ClusterResolvers"):
        UnionResolver({"worker": ["a:1"]})  # type: ignore[arg-type]


def test_slurm_lists() -> None:
    assert expand_hostlist("n[1-2],m5,o[3-4,6,7-9]") == ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]
    assert expand_hostlist("r[1-2]n[08-10]") == [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    for wrong in ("n[1-2", "n[a-b]", "n1,,n2"):
        with pytest.raises(ValueError, match="cannot be read"):
            expand_hostlist(wrong)
    with pytest.raises(ValueError, match="cannot be read"):
        expand_tasks_per_node("2x3")


def test_slurm_keeps_the_order_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"PROCID": "2", "STEP_NUM_TASKS": "3", "STEP_TASKS_PER_NODE": "2,1", "STEP_NODELIST": "n[9-10]"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    resolver = SlurmClusterResolver(gpus_per_node=0)
    assert resolver.cluster_spec().as_dict() == {"worker": ["n9:8888", "n9:8889", "n10:8888"]}
    assert resolver.master() == "grpc://n10:8888"
    with pytest.raises(RuntimeError, match="more GPUs per node"):
        SlurmClusterResolver(gpus_per_node=1, gpus_per_task=1)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("gpus_per_node", {"gpus_per_node": "2"}),
        ("gpus_per_node", {"gpus_per_node": 2.5, "gpus_per_task": 1}),
        ("gpus_per_task", {"gpus_per_node": 2, "gpus_per_task": 0.5}),
        ("gpus_per_task", {"gpus_per_node": 2, "gpus_per_task": [0]}),
    ]
    for name, options in wrong:
        with pytest.raises(TypeError, match=f"`{name}` must be a whole number of GPUs"):
            SlurmClusterResolver(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": {"worker": "3"}}, r"`jobs` must have whole numbers of tasks, got '3' for 'worker'; write e\.g\."),
        ({"jobs": ["worker"]}, r"`jobs` must be a dictionary of numbers of tasks, got \['worker'\]; write e\.g\."),
        ({"jobs": {"worker": 4, "ps": -1}}, r"`jobs` has -1 tasks for 'ps', which is negative; write e\.g\."),
        ({"tasks_per_node": {"n9": "2", "n10": 1}}, r"`tasks_per_node` must have whole numbers of tasks, got '2'"),
        ({"tasks_per_node": -1}, r"`tasks_per_node` has -1 tasks for 'n9'"),
        ({"port_base": "8888"}, r"`port_base` must be a whole number, got '8888'; write e\.g\. port_base=8888"),
        ({"port_base": 65535}, r"port_base=65535 gives .* the ports 65535 to 65536, but ports .* from 1 to 65535"),
        ({"port_base": 0}, r"port_base=0 gives"),
    ],
)
def test_arguments_for_slurm(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    step = {"PROCID": "2", "STEP_NUM_TASKS": "3", "STEP_TASKS_PER_NODE": "2,1", "STEP_NODELIST": "n[9-10]"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises((TypeError, ValueError), match=message):
        SlurmClusterResolver(gpus_per_node=0, **options)
    assert SlurmClusterResolver(port_base=65534, gpus_per_node=0).cluster_spec().task_address("worker", 1) == "n9:65535"


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    resolver = TorchrunClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {"worker": ["node0:29500", "rank-1"]}
    assert resolver.master() == "node0:29500"
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="RANK and WORLD_SIZE are not set"):
        TorchrunClusterResolver()


@pytest.mark.parametrize("empty", ["RANK", "WORLD_SIZE"])
def test_an_empty_variable_of_torchrun_is_named(monkeypatch: pytest.MonkeyPatch, empty: str) -> None:
    """A template whose value was missing: on every process it would be rank 0."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "" if name == empty else "2")
    with pytest.raises(ValueError, match=rf"variable {empty} is empty.*e\.g\. RANK=0 and WORLD_SIZE=2, or unset both"):
        launch_env.launch()
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert launch_env.launch() is None


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is here")
def test_programs_that_go_on_without_a_tpu() -> None:
    """They catch ``ValueError``, wherever TensorFlow may find out."""
    for make in (TPUClusterResolver, TPUClusterResolver.connect, lambda: TPUClusterResolver("")):
        with pytest.raises(ValueError, match=r"There is no TPU here: torch_xla is not installed.*Use another strategy"):
            make()
    local = TPUClusterResolver("local")
    for make in (lambda: tfd.tpu.experimental.initialize_tpu_system(local), lambda: tfd.TPUStrategy(local)):
        with pytest.raises(ValueError, match="TPUStrategy needs torch_xla") as raised:
            make()
        assert isinstance(raised.value, ImportError)


def test_tpu_hosts_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TPUClusterResolver("local").cluster_spec().as_dict() == {"worker": ["localhost:8470"]}
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t0,t1")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_CHIPS_PER_HOST_BOUNDS", "2,2,1")
    with TPUClusterResolver.connect() as resolver:
        assert resolver.cluster_spec().as_dict() == {"worker": ["t0:8470", "t1:8470"]}
        assert (resolver.task_type, resolver.task_id, resolver.get_master()) == ("worker", 1, "")
        assert resolver.master("worker", 0) == "t0:8470"
        assert resolver.num_accelerators() == {"TPU": 4}
    with pytest.raises(ValueError, match="cannot connect to a TPU elsewhere"):
        TPUClusterResolver("grpc://10.0.0.1:8470")


def test_a_cluster_as_a_text_has_its_jobs_in_order() -> None:
    """As in TensorFlow: of two tasks that list the jobs in another order the texts can be compared."""
    spec = ClusterSpec({"worker": ["b:1", "c:1"], "ps": {1: "a:1"}})
    assert str(spec) == repr(spec) == "ClusterSpec({'ps': {1: 'a:1'}, 'worker': ['b:1', 'c:1']})"
    assert spec.jobs == ["worker", "ps"]

"""What tells a process its cluster: ``TF_CONFIG``, SLURM, environment variables, answers of Kubernetes and of GCE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from inputs import DEEP, WIDE_NUMBER, altered, bounded, json_texts, texts, values

from tfstyle_dist.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.cluster_resolver.slurm import expand_hostlist, expand_tasks_per_node
from tfstyle_dist.core import env, launch_env
from tfstyle_dist.core.logging import get_logger

pytestmark = pytest.mark.timeout(120)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def may_stand_in_the_environment(text: str) -> bool:
    """Whether the system takes it as a variable."""
    return "\0" not in text and not any(
        0xD800 <= ord(letter) < 0xDC80 or (ord(letter) > 0xDCFF and ord(letter) < 0xE000) for letter in text
    )


TF_CONFIG = {
    "cluster": {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": {"0": "p:1", "3": "q:1"}},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}


@given(json_texts(altered(TF_CONFIG)).filter(may_stand_in_the_environment))
@example(DEEP)
@example(WIDE_NUMBER)
@example('{"task": {"type": "worker", "index": Infinity}}')
@example('{"task": {"type": "worker", "index": 1.5}}')
@example('{"cluster": {"worker": {"1": "a:1", "01": "b:1"}}}')
@example('{"cluster": {"worker": {"-1": "a:1", "0": "b:1", "2": "c:1"}}}')
@example('{"cluster": {"worker": {"1000000000000": "a:1"}}}')
@bounded(50)
def test_tf_config(text: str) -> None:
    """Every question is answered, or refused with the errors that TensorFlow has; no task is lost."""
    with environment(TF_CONFIG=text):
        resolver = TFConfigClusterResolver()
        for ask in (
            resolver.cluster_spec, resolver.master, lambda: resolver.task_type, lambda: resolver.task_id,
            lambda: resolver.rpc_layer,
        ):  # fmt: skip
            try:
                answer = ask()
            except (ValueError, TypeError) as error:
                assert_helps(error)
                continue
            if isinstance(answer, ClusterSpec):
                given_cluster = json.loads(text).get("cluster", {}) if text.lstrip().startswith("{") else {}
                assert {job: len(tasks) for job, tasks in given_cluster.items()} == {
                    job: answer.num_tasks(job) for job in answer.jobs
                }
                for job in answer.jobs:
                    answer.job_tasks(job)
                answer.as_dict()


RAW = (
    "invalid literal", "not enough values", "too many values", "cannot convert", "object is not", "unsupported operand",
    "argument must be", "has no attribute", "embedded null", "Exceeds the limit", "must be real number",
    "zip() argument", "unhashable", "codec can't", "list index", "not subscriptable", "fromtimestamp",
)  # fmt: skip
"""What Python says about a value of its own; a user is told what was given and what to write instead."""


def assert_helps(error: Exception, name: str = "") -> None:
    """The error is one of the package's own sentences, and has this name in it."""
    said = str(error).partition("; ")[0]
    assert name in str(error)
    assert not any(raw in said for raw in RAW), f"{type(error).__name__}: {error}"
    assert " " in said, repr(error)


host_lists = st.text("n1-2[],0 ²", max_size=30) | texts


@given(host_lists)
@example("n[1-999999999999]")
@example("n[1-999][1-999][1-999]")
@example("n]1[")
@example("n[]")
@example("n[3-1]")
@example("n[²]")
@example("," * 100_000)
@example("n[1-2],n2")
@bounded(60)
def test_slurm_host_lists(text: str) -> None:
    """Every host that is named comes out, or the text is refused."""
    try:
        hosts = expand_hostlist(text)
    except ValueError as error:
        assert_helps(error)
        return
    assert len(hosts) == len(set(hosts))
    assert not any(letter in host for host in hosts for letter in "[],")
    if "[" not in text:
        assert hosts == text.split(",")


@given(st.text("0123456789(x), ²", max_size=20))
@example("1(x999999999999)")
@example(WIDE_NUMBER)
@bounded(50)
def test_slurm_task_counts(text: str) -> None:
    try:
        counts = expand_tasks_per_node(text)
    except ValueError as error:
        assert_helps(error)
        return
    assert len(counts) <= 1 << 16


@given(host_lists, st.text("0123456789(x),", max_size=12), texts | st.integers(-1, 9).map(str), texts)
@example("n[1-2]", "1(x2)", "1", "2")
@example("n[1-2]", "1", "0", "2")
@bounded(50)
def test_slurm_steps(nodes: str, per_node: str, rank: str, total: str) -> None:
    given_all = (nodes, per_node, rank, total)
    if not all(map(may_stand_in_the_environment, given_all)):
        return
    names = ("STEP_NODELIST", "STEP_TASKS_PER_NODE", "PROCID", "STEP_NUM_TASKS")
    with environment(**{f"SLURM_{name}": value for name, value in zip(names, given_all, strict=True)}):
        try:
            resolver = SlurmClusterResolver(auto_set_gpu=False)
            spec = resolver.cluster_spec()
        except (ValueError, RuntimeError) as error:
            assert_helps(error)
            return
        assert spec.num_tasks("worker") == int(total)
        assert resolver.task_id == int(rank) < int(total)


READERS: dict[str, Callable[[], Any]] = {
    "RANK": lambda: environment_of_a_rank(),
    "WORLD_SIZE": lambda: environment_of_a_rank(),
    "LOCAL_RANK": lambda: environment_of_a_rank(),
    "LOCAL_WORLD_SIZE": lambda: environment_of_a_rank(),
    "MASTER_PORT": lambda: in_a_rank(launch_env.master_address, MASTER_ADDR="h"),
    "SLURM_JOB_ID": launch_env.slurm_job_id,
    "TPU_WORKER_ID": lambda: TPUClusterResolver("local"),
    "TPU_WORKER_HOSTNAMES": lambda: TPUClusterResolver("local").cluster_spec(),
    "TPU_CHIPS_PER_HOST_BOUNDS": lambda: TPUClusterResolver("local").num_accelerators(),
    "TFSTYLE_TIMEOUT_SECONDS": env.timeout,
    "TFSTYLE_START_TIMEOUT_SECONDS": lambda: env.start_timeout(None),
    "TFSTYLE_PS_PATIENCE_SECONDS": env.coordinator_grace,
    "TFSTYLE_PS_TCP": lambda: env.parameter_server_tcp(False),
    "TFSTYLE_LOG_LEVEL": lambda: log_level(),
}


def in_a_rank(read: Callable[[], Any], **variables: str) -> Any:
    """Reads with further variables set."""
    with environment(**{name: value for name, value in variables.items() if name not in os.environ}):
        return read()


def environment_of_a_rank() -> Any:
    found = in_a_rank(launch_env.launch, RANK="0", WORLD_SIZE="1")
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size
    return found


def log_level() -> None:
    logger = get_logger()
    before = logger.level
    logger.setLevel(0)
    try:
        get_logger()
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("name", READERS)
@given(st.data())
@bounded(60)
def test_variables(name: str, data: Any) -> None:
    """A variable has a meaning, or is refused by its name."""
    odd = st.sampled_from(["nan", "inf", "-inf", "1e300", "1e18", "²", "1_0", WIDE_NUMBER, "-1", "2,x,1", "a,,b", " 1"])
    text = data.draw((odd | texts | st.integers().map(str) | st.floats().map(str)).filter(may_stand_in_the_environment))
    with environment(**{name: text}):
        try:
            READERS[name]()
        except ValueError as error:
            assert_helps(error, name.removeprefix("LOCAL_"))


def pods(data: Any) -> Any:
    """What the Kubernetes client makes of an answer: any field may be missing."""
    text = st.none() | texts
    one = st.builds(
        lambda name, phase, pod_ip, host_ip: SimpleNamespace(
            metadata=SimpleNamespace(name=name),
            status=None if phase is None else SimpleNamespace(phase=phase, pod_ip=pod_ip, host_ip=host_ip),
        ),
        text, st.none() | st.sampled_from(["Running", "Pending"]), text, text,
    )  # fmt: skip
    return data.draw(st.none() | st.lists(one, max_size=3))


@given(st.data())
@bounded(60)
def test_answers_of_kubernetes(data: Any) -> None:
    """No pod is left out, and none gets an address that it does not have."""
    found = pods(data)
    client = SimpleNamespace(list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=found))
    try:
        spec = KubernetesClusterResolver({"worker": ["a=b"]}, override_client=client).cluster_spec()
    except RuntimeError as error:
        assert_helps(error)
        return
    assert found is not None
    assert spec.num_tasks("worker") == len(found)
    assert not any(address.startswith(("None:", ":")) for address in spec.job_tasks("worker") if address)


class Answers:
    """A compute service that gives these answers."""

    def __init__(self, groups: Any, machine: Any) -> None:
        self._groups, self._machine = groups, machine

    def instanceGroups(self) -> Any:
        return SimpleNamespace(
            listInstances=lambda **_: SimpleNamespace(execute=lambda: self._groups), listInstances_next=lambda **_: None
        )

    def instances(self) -> Any:
        return SimpleNamespace(get=lambda **_: SimpleNamespace(execute=lambda: self._machine))


GROUP = {"items": [{"instance": "https://x/instances/m0"}, {"instance": "https://x/instances/m1"}]}
MACHINE = {"networkInterfaces": [{"networkIP": "10.0.0.1"}]}


@given(altered(GROUP) | st.just(GROUP), altered(MACHINE) | st.just(MACHINE))
@bounded(60)
def test_answers_of_gce(groups: Any, machine: Any) -> None:
    try:
        spec = GCEClusterResolver("p", "z", "g", 1, service=Answers(groups, machine)).cluster_spec()
    except RuntimeError as error:
        assert_helps(error)
        return
    assert spec.num_tasks("worker") == len(groups.get("items", []))


@given(values)
@bounded(60)
def test_cluster_specs(cluster: Any) -> None:
    try:
        spec = ClusterSpec(cluster)
    except (TypeError, ValueError) as error:
        assert_helps(error)
        return
    assert ClusterSpec(spec.as_dict()) == spec

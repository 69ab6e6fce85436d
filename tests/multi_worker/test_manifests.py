"""The manifests for Kubernetes: every field is one that the clients know, and what must agree does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.parameter_server.addresses import check_cluster

CONFIGS = Path(__file__).resolve().parents[2] / "torchrun_configs"


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((CONFIGS / name).read_text()))


def check(value: Any, kind: str, path: str) -> None:
    """Refuses what the type ``kind`` of the official client does not have; that client itself ignores it."""
    client = pytest.importorskip("kubernetes.client")
    kind = kind.replace("Dict[", "dict(").replace("List[", "list[")  # as written since version 37
    if kind.startswith("list["):
        assert isinstance(value, list), path
        for number, item in enumerate(value):
            check(item, kind[5:-1], f"{path}[{number}]")
    elif kind.startswith("dict("):
        assert isinstance(value, Mapping), path
        for key, item in value.items():
            check(item, kind[5:-1].partition(", ")[2], f"{path}.{key}")
    elif hasattr(client, kind):
        model = getattr(client, kind)
        names = {given: ours for ours, given in model.attribute_map.items()}
        assert isinstance(value, Mapping), path
        for key, item in value.items():
            assert key in names, f"{path}: {kind} has no {key}"
            check(item, model.openapi_types[names[key]], f"{path}.{key}")
    else:
        kinds = {"str": str, "int": int, "bool": bool, "object": (str, int, dict, list)}
        assert isinstance(value, kinds[kind]), f"{path} is {value!r}, which is no {kind}"


KINDS = {"Service": "V1Service", "Job": "V1Job", "StatefulSet": "V1StatefulSet"}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes_ps.yaml"])
def test_every_field_is_known(name: str) -> None:
    for document in documents(name):
        check(document, KINDS[document["kind"]], document["kind"])


def test_a_wrong_field_is_found() -> None:
    (service, *_) = documents("kubernetes_ps.yaml")
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(AssertionError, match="V1ServiceSpec has no clusterIp"):
        check(service, "V1Service", "Service")


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_the_tasks_of_the_parameter_server_cluster_agree() -> None:
    service, *tasks = documents("kubernetes_ps.yaml")
    domain, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    told = {}
    for task in tasks:
        pod = task["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        config = json.loads(environment(container)["TF_CONFIG"].replace("$(INDEX)", "0"))
        told[config["task"]["type"]] = config["cluster"]
        assert pod["metadata"]["labels"].items() >= service["spec"]["selector"].items()
        check_cluster(config["cluster"])
        addresses = config["cluster"][config["task"]["type"]]
        if task["kind"] == "StatefulSet":
            names = [f"{task['metadata']['name']}-{index}" for index in range(task["spec"]["replicas"])]
            assert task["spec"]["serviceName"] == domain
        else:
            names = [pod["spec"]["hostname"]]
            assert pod["spec"]["subdomain"] == domain
        assert addresses == [f"{name}.{domain}:{port}" for name in names]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert environment(container)["TFSTYLE_PS_KEYS"].startswith(mounts["key"] + "/")
        (secret,) = (volume["secret"] for volume in pod["spec"]["volumes"] if volume["name"] == "key")
        assert secret["defaultMode"] == 0o400  # a key that others may read is refused
    assert told.keys() == {"chief", "worker", "ps"}
    assert told["chief"] == told["worker"] == told["ps"]


def test_the_job_of_the_jobset_has_one_pod_for_each_worker() -> None:
    (jobset,) = documents("jobset.yaml")
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    check(job, "V1JobSpec", "JobSet.spec.replicatedJobs[0].template.spec")
    (container,) = job["template"]["spec"]["containers"]
    env = environment(container)
    assert int(env["WORLD_SIZE"]) == job["completions"] == job["parallelism"]
    assert env["MASTER_ADDR"] == f"{jobset['metadata']['name']}-{group['name']}-0-0.{jobset['metadata']['name']}"
    assert int(env["MASTER_PORT"]) == container["ports"][0]["containerPort"]


def test_kubeflow_knows_every_field_of_the_trainjob() -> None:
    """By the models that Kubeflow's own client sends; they drop what they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow is not installed: make test-engines")
    (trainjob,) = documents("trainjob.yaml")
    model = models.TrainerV1alpha1TrainJob.from_dict(trainjob)
    assert as_given(model.to_dict(), trainjob) == trainjob


def as_given(told: Any, given: Any) -> Any:
    """What a model says of the fields that were given."""
    if isinstance(given, Mapping):
        return {key: as_given(told.get(key), value) for key, value in given.items()}
    return told

"""The files of the Kubernetes how-to parse, fit each other, and run existing commands. No cluster has run them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import COMMANDS
from surefoot.recipes.reading import make_recipe

yaml = pytest.importorskip("yaml")
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "kubernetes.md"


def objects() -> dict[str, Any]:
    """By kind."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    parsed = [each for block in blocks for each in yaml.safe_load_all(block)]
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(each) or "data" in each for each in parsed)
    return {each["kind"]: each for each in parsed}


def pod(kind: str) -> dict[str, Any]:
    spec = objects()[kind]["spec"]
    found: dict[str, Any] = (spec["pytorchReplicaSpecs"]["Worker"] if kind == "PyTorchJob" else spec)["template"]["spec"]
    return found


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob"])
def test_a_pod_mounts_what_it_uses(kind: str) -> None:
    made, spec = objects(), pod(kind)
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == made["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["recipe"]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert volumes["memory"] == {"name": "memory", "emptyDir": {"medium": "Memory"}}
    assert {"mountPath": "/dev/shm", "name": "memory"} in container["volumeMounts"]
    assert spec["terminationGracePeriodSeconds"] > 25 + 5, "the run has time to save"


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob"])
def test_the_command_is_one_of_ours_with_the_recipe_that_is_mounted(kind: str) -> None:
    made, (container,) = objects(), pod(kind)["containers"]
    words = [*container["command"], *container["args"]]
    assert words[0] == "torchrun", "signals reach it without a shell"
    start = words.index("surefoot")
    assert words[start - 1] == "-m"
    assert words[start + 1] in COMMANDS
    assert words[start + 2 :] == ["/recipe/recipe.toml", "--run-dir=/runs/first"]
    recipe = make_recipe(tomllib.loads(made["ConfigMap"]["data"]["recipe.toml"]))
    assert recipe.device == "cuda"


def test_the_machines_ranks_and_gpus_of_each_file_agree() -> None:
    made = objects()
    plain, job = made["Job"], made["PyTorchJob"]["spec"]
    value = dict(word.split("=", 1) for word in pod("Job")["containers"][0]["args"] if "=" in word)
    gpus = {kind: pod(kind)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for kind in ("Job", "PyTorchJob")}
    assert int(value["--nnodes"]) == plain["spec"]["completions"] == plain["spec"]["parallelism"]
    assert plain["spec"]["completionMode"] == "Indexed", "pods then have names by their number"
    assert int(value["--nproc-per-node"]) == gpus["Job"]
    assert int(job["nprocPerNode"]) == gpus["PyTorchJob"]
    elastic, workers = job["elasticPolicy"], job["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == workers
    service = made["Service"]
    name, subdomain = plain["metadata"]["name"], pod("Job")["subdomain"]
    assert subdomain == service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    assert value["--rdzv-endpoint"] == f"{name}-0.{subdomain}:{port}"
    assert service["spec"]["selector"] == plain["spec"]["template"]["metadata"]["labels"]

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from deploy.config import ClusterConfig, Overrides, RayConfig, cluster_config, cluster_from_options
from headrace.config import ConfigError
from headrace.wire.tls_config import TlsConfig

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "tiny_models" / "headrace-tiny-qwen3.5")


def load(**data):
    return cluster_config({"model": MODEL, **data}, source="c.yaml", base=ROOT)


def test_a_model_alone_gives_one_node_of_each_role():
    config = load()
    assert (config.prefill.count, config.decode.count) == (1, 1)
    assert config.prefill.node.model_path == config.decode.node.model_path == str(config.router.model_path) == MODEL


def test_sections_reach_the_nodes_own_configs():
    config = load(
        prefill={"count": 3, "node": {"engine": {"threads": 2}, "fetch_from_others": {"enabled": False}}},
        decode={"node": {"local_prefill": {"max_tokens": 0}}, "placement": {"resources": {"fast": 1}}},
        router={"port": 0},
    )
    assert config.prefill.count == 3
    assert config.prefill.node.engine.threads == 2
    assert not config.prefill.node.fetch_from_others.enabled
    assert config.decode.node.local_prefill.max_tokens == 0
    assert config.decode.placement.resources == {"fast": 1}
    assert config.router.port == 0


def counts(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(group.count for group in config.groups)


def test_nodes_that_do_both_replace_the_pair_that_a_cluster_has_by_default():
    assert counts(load()) == (1, 1, 0)
    assert counts(load(both={"count": 2})) == (0, 0, 2)
    assert counts(load(both={"count": 2}, decode={"count": 3})) == (0, 3, 2)
    assert counts(load(prefill={"count": 0})) == (0, 1, 0)
    assert counts(load(decode={"count": 0})) == (1, 0, 0), "which decodes, too"


def test_the_nodes_of_a_group_start_in_its_role():
    assert [group.node.role for group in load().groups] == ["prefill", "decode", "both"]


def test_the_command_line_asks_for_nodes_that_do_both():
    assert counts(cluster_from_options(None, Overrides(model=Path(MODEL), both=3))) == (0, 0, 3)


def devices(config: ClusterConfig) -> set[tuple[str, float]]:
    return {(group.node.engine.device, group.placement.num_gpus) for group in config.groups}


def test_nodes_on_gpus_have_one_each_unless_the_file_says_otherwise(tmp_path):
    assert devices(load()) == {("cpu", 0)}
    assert devices(cluster_from_options(None, Overrides(model=Path(MODEL), device="cuda"))) == {("cuda", 1)}
    file = tmp_path / "cluster.yaml"
    engine = {"device": "cuda:1", "threads": 3, "max_step_tokens": 512}
    prefill = {"placement": {"num_cpus": 2, "num_gpus": 0.5}, "node": {"engine": engine}}
    file.write_text(yaml.safe_dump({"model": MODEL, "prefill": prefill, "decode": None}))
    on_gpus = cluster_from_options(file, Overrides(device="cuda"))
    assert devices(on_gpus) == {("cuda", 0.5), ("cuda", 1)}
    assert (on_gpus.prefill.node.engine.threads, on_gpus.prefill.placement.num_cpus) == (3, 2)
    engines = (on_gpus.prefill.node.engine, on_gpus.decode.node.engine)
    assert [(each.max_step_tokens, each.max_running) for each in engines] == [(512, 256), (8192, 256)]
    assert devices(cluster_from_options(file, Overrides(device="cpu"))) == {("cpu", 0)}


def test_a_device_for_a_section_that_is_no_mapping_leaves_its_fault_to_be_named(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"model": MODEL, "prefill": [1]}))
    with pytest.raises(ConfigError, match="prefill"):
        cluster_from_options(file, Overrides(device="cuda"))


def test_without_a_file_nodes_take_the_gpus_of_the_host():
    asked = Overrides(model=Path(MODEL))
    assert asked.for_host(0) == asked
    assert asked.for_host(2) == replace(asked, device="cuda")
    assert asked.for_host(1) == replace(asked, device="cuda", both=1), "one node on one GPU"
    assert replace(asked, both=3).for_host(4) == replace(asked, both=3, device="cuda")
    for counts, num_gpus, num_nodes in (
        ({"prefill": 1}, 1, 2),
        ({"prefill": 2}, 2, 3),
        ({"both": 2, "decode": 1}, 2, 3),
    ):
        with pytest.raises(ConfigError, match=f"{num_nodes} nodes, {num_gpus} GPUs here: give --both {num_gpus}, or"):
            replace(asked, **counts).for_host(num_gpus)
    assert replace(asked, device="cpu").for_host(2).device == "cpu"


def test_the_last_of_several_routers_needs_a_port():
    assert load(router={"port": 65534, "count": 2}).router.count == 2
    with pytest.raises(ConfigError, match=r"count 3: the last router would have port 65536"):
        load(router={"port": 65534, "count": 3})


def test_the_ports_of_several_routers_are_all_different():
    one = load(router={"host": "127.0.0.2", "port": 8000, "control_port": 8000})
    assert one.router.port == one.router.control_port  # at two addresses
    assert load(router={"port": 8000, "control_port": 8002, "count": 2}).router.count == 2
    with pytest.raises(ConfigError, match=r"count 3: port 8000 to 8002 and control_port 8002 to 8004 overlap"):
        load(router={"port": 8000, "control_port": 8002, "count": 3})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prefil": {}}, "c.yaml: prefil is an unknown key: did you mean prefill?"),
        ({"decode": {"node": {"engine": {"treads": 1}}}}, ".engine.treads is an unknown key: did you mean threads?"),
        (
            {"ray": {"zzz": 1}},
            "c.yaml: ray.zzz is an unknown key: known here: address, start_timeout_s, ",
        ),
        ({"router": {"port": "abc"}}, "c.yaml: router.port 'abc': must be a whole number"),
        ({"decode": [1]}, "c.yaml: decode [1]: must be a mapping of keys to values"),
        ({"prefill": {"count": -1}}, "c.yaml: prefill.count -1: must be at least 0"),
        (
            {"decode": {"count": 0}, "router": {"roles": "fixed"}},
            "c.yaml: decode.count 0: no node would decode; give one here or in both, or make router.roles elastic",
        ),
        ({"decode": {"count": 0}, "prefill": {"count": 0}}, "c.yaml: decode.count 0: a cluster needs a node"),
        ({"both": {"node": {"role": "decode"}}}, "c.yaml: both.node.role: set at start for each node; remove it"),
        (
            {"prefill": {"placement": {"strategy": "heap"}}},
            "placement.strategy 'heap': must be one of pack, spread",
        ),
        ({"decode": {"placement": {"num_gpus": 1.5}}}, "decode.placement.num_gpus 1.5: Ray gives whole GPUs above 1"),
        ({"decode": {"node": {"name": "d7"}}}, "c.yaml: decode.node.name: set at start for each node; remove it"),
        ({"decode": {"node": {"engine": {"state_share": 2}}}}, "decode.node.engine.state_share 2"),
        ({"prefill": {"node": {"fetch_from_others": {"min_tokens": 0}}}}, "fetch_from_others.min_tokens 0: must be"),
        ({"decode": {"node": {"ucx": {"transports": ""}}}}, "decode.node.ucx.transports '': must not be empty"),
        ({"model": "/no/such/folder"}, "model /no/such/folder: no config.json there"),
        ({"model": None}, "c.yaml: model is missing: give the checkpoint's folder"),
        ({"name": "a/b"}, "name 'a/b': use letters, digits"),
    ],
)
def test_a_fault_names_path_value_and_remedy(data, message):
    with pytest.raises(ConfigError) as failure:
        load(**data)
    assert message in str(failure.value)


def test_every_unknown_key_is_reported_at_once():
    with pytest.raises(ConfigError) as failure:
        load(nmae="x", ray={"adress": "auto"})
    assert "nmae" in str(failure.value)
    assert "ray.adress is an unknown key: did you mean address?" in str(failure.value)


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"model": MODEL, "prefill": {"count": 2}, "router": {"port": 9000}}))
    config = cluster_from_options(file, Overrides(prefill=4, port=0, address="auto", name="other"))
    assert (config.prefill.count, config.router.port, config.ray.address, config.name) == (4, 0, "auto", "other")
    assert cluster_from_options(file, Overrides()).prefill.count == 2


def test_the_command_line_fills_sections_that_are_empty_in_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {MODEL}\nprefill:\nrouter:\nray:\n")
    config = cluster_from_options(file, Overrides(prefill=3, port=9000))
    assert (config.prefill.count, config.router.port) == (3, 9000)
    assert config.ray == RayConfig()


def test_a_relative_model_is_taken_from_the_files_folder(tmp_path):
    (tmp_path / "model").symlink_to(MODEL)
    file = tmp_path / "cluster.yaml"
    file.write_text("model: model\n")
    assert cluster_from_options(file, Overrides()).prefill.node.model_path == MODEL


@pytest.mark.parametrize("section", ["model", "api_keys_file", "chat_template"])
@pytest.mark.parametrize("path", ["a\0b", "a" * 256, "a/" * 3000], ids=["NUL", "long name", "long path"])
def test_a_path_that_no_file_can_have_is_a_fault(section, path):
    data = {"model": path} if section == "model" else {"router": {section: path}}
    with pytest.raises(ConfigError, match=r"must be a path without NUL, of fewer than 4,096 bytes"):
        load(**data)


@pytest.mark.parametrize("content", [None, "model: [", "just text"])
def test_an_unreadable_file_is_an_error_that_names_it(tmp_path, content):
    file = tmp_path / "cluster.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"cluster\.yaml"):
        cluster_from_options(file, Overrides())


@pytest.mark.parametrize("file", sorted((ROOT / "deploy" / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_examples_load_and_are_open_to_nobody(file):
    config = cluster_from_options(file, Overrides())
    assert config.router.host == "127.0.0.1"  # without a gateway
    assert config.ray.address is None or config.tls is not None  # between hosts


def test_the_examples_are_there():
    assert {file.name for file in (ROOT / "deploy" / "examples").glob("*.yaml")} == {
        "gpu.yaml",
        "one-host.yaml",
        "two-hosts.yaml",
    }


class TestKubeRay:
    documents: ClassVar = {
        document["kind"]: document
        for document in yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "headrace.yaml").read_text())
    }

    def test_the_cluster_file_in_the_config_map_loads(self):
        data = yaml.safe_load(self.documents["ConfigMap"]["data"]["cluster.yaml"])
        config = cluster_config({**data, "model": MODEL}, source="ConfigMap", base=ROOT)
        groups = self.documents["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert {group["groupName"]: group["replicas"] for group in groups} == {
            "prefill": config.prefill.count,
            "decode": config.decode.count,
        }
        for role, group in zip((config.prefill, config.decode), groups, strict=True):
            (resource,) = role.placement.resources
            assert resource in group["rayStartParams"]["resources"]

    def test_the_entrypoint_reads_the_mounted_file(self):
        spec = self.documents["RayJob"]["spec"]
        assert spec["entrypoint"] == "headrace up -c /etc/headrace/cluster.yaml --address auto"
        pod = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        assert {"name": "cluster-file", "mountPath": "/etc/headrace"} in pod["containers"][0]["volumeMounts"]
        assert pod["volumes"][0]["configMap"]["name"] == self.documents["ConfigMap"]["metadata"]["name"]

    def test_the_control_plane_is_in_tls_and_every_pod_has_the_certificates(self):
        tls = yaml.safe_load(self.documents["ConfigMap"]["data"]["cluster.yaml"])["tls"]
        (folder,) = {str(Path(tls[file]).parent) for file in ("ca", "cert", "key")}
        for spec in self.pods():
            (mount,) = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == folder]
            assert mount["name"] in [volume["name"] for volume in spec["volumes"] if "secret" in volume]

    def test_workers_keep_their_niceness(self):
        for spec in self.pods():
            assert {"name": "RAY_worker_niceness", "value": "0"} in spec["containers"][0]["env"]

    def pods(self):
        cluster = self.documents["RayJob"]["spec"]["rayClusterSpec"]
        return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]

    def test_the_service_reaches_the_router(self):
        head = self.documents["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
        selector = self.documents["Service"]["spec"]["selector"]
        assert selector.items() <= head["metadata"]["labels"].items()


def test_files_of_the_router_are_taken_from_the_files_folder(tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    (tmp_path / "keys.yaml").write_text("{}")
    files = {"chat_template": "mine.jinja", "api_keys_file": "keys.yaml"}
    config = cluster_config({"model": MODEL, "router": files}, source="c.yaml", base=tmp_path)
    assert config.router.chat_template == tmp_path / "mine.jinja"
    assert config.router.api_keys_file == tmp_path / "keys.yaml"


TLS = {"ca": "certs/ca.pem", "cert": "/etc/headrace/node.pem", "key": "certs/../node.key"}


def test_certificates_are_said_once_and_reach_router_and_nodes(tmp_path: Path):
    config = cluster_config({"model": MODEL, "tls": TLS | {"server_name": "node"}}, source="c.yaml", base=tmp_path)
    wanted = TlsConfig(
        str(tmp_path / "certs/ca.pem"), "/etc/headrace/node.pem", str(tmp_path / "certs/../node.key"), "node"
    )
    assert config.tls == config.router.tls == config.prefill.node.tls == config.decode.node.tls == wanted
    assert load().tls is load().router.tls is load().decode.node.tls is None


def test_links_to_certificates_are_not_followed(tmp_path: Path):
    """Where a mounted secret's links lead changes when it is renewed."""
    (tmp_path / "ca.pem").symlink_to("elsewhere")
    config = cluster_config({"model": MODEL, "tls": TLS | {"ca": "ca.pem"}}, source="c.yaml", base=tmp_path)
    assert config.tls is not None and config.tls.ca == str(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tls": {"ca": "x", "cert": "y"}}, "tls.key is missing: add it"),
        ({"tls": {**TLS, "certs": "y"}}, "tls.certs is an unknown key: did you mean cert?"),
        ({"tls": "yes"}, "tls 'yes': must be a mapping"),
        ({"tls": {**TLS, "ca": 3}}, "tls.ca 3: must be text"),
        ({"router": {"tls": TLS}}, "router.tls: set it once, for the whole cluster"),
        ({"decode": {"node": {"tls": TLS}}}, "decode.node.tls: set it once, for the whole cluster"),
    ],
)
def test_a_fault_in_tls_names_the_key(data, message):
    with pytest.raises(ConfigError) as failure:
        load(**data)
    assert message in str(failure.value)

"""Arguments of the application on Ray: those of `jaxspec serve`, from texts or from YAML."""

from pathlib import Path

import pytest
import yaml

from jaxspec.options import engine_options as engine
from jaxspec.ray.arguments import OPTIONS, RayOptions, read_arguments
from jaxspec.server.command import options_of, parser
from jaxspec.server.options import ServerOptions

ROOT = Path(__file__).parents[2]


def test_without_arguments_all_defaults_hold():
    found = read_arguments({})
    assert found.ray == RayOptions()
    assert found.server == ServerOptions(max_stored_responses=0)
    config = {name: value for name, value in found.engine.items() if name in engine.OPTIONS}
    assert config.pop("model") is None
    assert engine.EngineConfig.of(None, config) == engine.EngineConfig()


@pytest.mark.parametrize(
    "given",
    [
        {  # of `serve run`: all are texts
            "model": "some/model",
            "revision": "123",
            "max_num_seqs": "4",
            "decode_buckets": "[1, 4]",
            "enable_prefix_caching": "false",
            "steps_per_dispatch": "auto",
            "num_speculative_tokens": "2",
            "speculative_config": '{"method": "ngram"}',
            "api_key": "7",
            "queue_timeout": "2.5",
            "num_replicas": "2",
            "max_replicas": "5",
        },
        {  # of a file in YAML
            "model": "some/model",
            "revision": "123",
            "max_num_seqs": 4,
            "decode_buckets": [1, 4],
            "enable_prefix_caching": False,
            "steps_per_dispatch": "auto",
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "api_key": ["7"],
            "queue_timeout": 2.5,
            "num_replicas": 2,
            "max_replicas": 5,
        },
    ],
)
def test_they_mean_what_the_command_line_means(given):
    words = (
        "some/model --revision 123 --max-num-seqs 4 --decode-buckets 1,4 --steps-per-dispatch auto "
        "--no-enable-prefix-caching --num-speculative-tokens 2 --speculative-config ngram "
        "--api-key 7 --queue-timeout 2.5 --max-stored-responses 0"
    )
    args = parser().parse_args(words.split())
    server, llm = options_of(args)
    found = read_arguments(given)
    assert found.ray == RayOptions(num_replicas=2, max_replicas=5)
    assert found.server == server
    config = {name: found.engine[name] for name in engine.OPTIONS if name in found.engine}
    wanted = {"model": args.model} | {name: llm[name] for name in engine.OPTIONS if name in llm}
    made = [engine.EngineConfig.of(each.pop("model"), each) for each in (config, wanted)]
    assert made[0] == made[1]
    assert found.engine["queue_timeout"] == 2.5


def test_a_replica_has_the_gpus_of_its_group():
    assert read_arguments({}).num_gpus == 1
    assert read_arguments({"tensor_parallel_size": "2"}).num_gpus == 2
    assert read_arguments({"tensor_parallel_size": 2, "num_gpus": 0}).num_gpus == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_num_seq": 4}, "max_num_seqs"),
        ({"num_replica": 4}, "num_replicas"),
        ({"port": 8000}, "port"),
        ({"api_processes": 2}, "api_processes"),
        ({"data_parallel_size": 2}, "num_replicas"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "nnodes"),
        ({"nodes_key_file": "key"}, "nodes_key_file"),
        ({"max_stored_responses": 5}, "max_stored_responses"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"enable_prefix_caching": "perhaps"}, "enable_prefix_caching"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"num_cpus": 0.0}, "num_cpus"),
        ({"num_cpus": "x"}, "num_cpus"),
        ({"max_body_mib": 0}, "max_body_mib"),
    ],
)
def test_a_wrong_one_is_named_before_anything_starts(given, named):
    with pytest.raises(ValueError, match=named):
        read_arguments(given)


def test_the_document_lists_all_that_are_of_ray():
    text = (ROOT / "docs/ray.md").read_text()
    assert [name for name in OPTIONS if f"`{name}`" not in text] == []


def test_the_manifest_has_valid_ones():
    service = yaml.safe_load((ROOT / "deploy/rayservice.yaml").read_text())["spec"]
    [application] = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert application["import_path"] == "jaxspec.ray:app"
    found = read_arguments(application["args"])
    [workers] = service["rayClusterConfig"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) % found.num_gpus == 0
    assert found.ray.max_replicas == workers["maxReplicas"]

import pytest

from node.actor import assigned_device


@pytest.mark.parametrize(
    ("device", "gpu_ids", "environ", "expected"),
    [
        ("cpu", [], {}, "cpu"),
        ("cuda", [], {}, "cuda"),
        ("cuda", [2], {}, "cuda:2"),
        ("cuda", ["3"], {"CUDA_VISIBLE_DEVICES": "1,3"}, "cuda:1"),
        ("cuda:1", [0], {}, "cuda:1"),
    ],
)
def test_a_node_takes_the_gpu_that_ray_gave_it(device, gpu_ids, environ, expected):
    assert assigned_device(device, gpu_ids, environ) == expected

import pickle
import threading

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from testkit import fake_mesh
from testkit.ranks.worker import _dumps


def test_plain_results_make_the_way():
    result = {"a": torch.arange(3), "b": [1, "x", None]}
    back = pickle.loads(_dumps(result))
    assert back["a"].tolist() == [0, 1, 2]
    assert back["b"] == [1, "x", None]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": [x]}], ids=["bare", "nested"])
def test_a_dtensor_is_refused_wherever_it_hides(wrap):
    with fake_mesh((2,)) as mesh:
        dtensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"return x\.to_local\(\) or x\.full_tensor\(\)"):
            _dumps(wrap(dtensor))


def test_what_does_not_pickle_is_named_by_type():
    with pytest.raises(TypeError, match="the result, a lock, cannot be sent back"):
        _dumps(threading.Lock())
